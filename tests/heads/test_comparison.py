"""Agreement of patterns, by hand; and their picture."""

import json
import math

import pytest
import torch

from surgery.common.errors import SurgeryError
from surgery.eval.report.heat_maps import LIMIT_COLOUR
from surgery.heads.comparison import compare, near_threshold, spearman
from surgery.heads.heat_map import head_maps, save_head_maps
from surgery.heads.pattern import HeadPattern


def pattern(values, method="duo"):
    return HeadPattern(torch.tensor(values, dtype=torch.float32), method)


A = pattern([[8, 7, 6, 5], [4, 3, 2, 1]])
B = pattern([[8, 1, 7, 2], [6, 3, 5, 4]], "needle")


def test_overlap_and_chance():
    found = compare({"a": A, "b": B}, shares=(0.125, 0.25, 0.5))
    assert json.loads(json.dumps(found)) == found
    assert (found["layers"], found["kv_heads"], found["shares"]) == (2, 4, [0.125, 0.25, 0.5])
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"]) == ("a", "b")
    # The best four of a are heads 0, 1, 2, 3 and of b 0, 2, 4, 6.
    assert [entry["heads"] for entry in pair["overlaps"]] == [1, 2, 4]
    assert [entry["shared"] for entry in pair["overlaps"]] == [1, 1, 2]
    assert [entry["overlap"] for entry in pair["overlaps"]] == [1, 0.5, 0.5]
    assert [entry["chance"] for entry in pair["overlaps"]] == [0.125, 0.25, 0.5]


def test_chance_is_that_of_random_choices():
    entry = compare({"a": A, "b": B}, shares=(0.5,))["pairs"][0]["overlaps"][0]
    generator = torch.Generator().manual_seed(0)
    draws = [len({*torch.randperm(8, generator=generator)[:4].tolist()} & {0, 1, 2, 3}) / 4 for _ in range(4000)]
    draws = torch.tensor(draws)
    assert math.isclose(draws.mean(), entry["chance"], abs_tol=0.02)
    assert math.isclose(draws.std(), entry["chance_sd"], abs_tol=0.01)


def test_spearman():
    # Squared differences of ranks 0, 36, 1, 9, 4, 0, 9, 9: 1 - 6 * 68 / (8 * 63).
    assert math.isclose(compare({"a": A, "b": B})["pairs"][0]["spearman"], 1 - 6 * 68 / 504)
    assert math.isclose(spearman(A.scores, A.scores.exp()), 1)
    assert math.isclose(spearman(A.scores, -A.scores), -1)
    assert spearman(A.scores, torch.ones(2, 4)) is None
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: covariance 4.5, variances 4.5 and 5.
    tied, other = torch.tensor([[1.0, 2.0], [2.0, 3.0]]), torch.tensor([[1.0, 3.0], [2.0, 4.0]])
    assert math.isclose(spearman(tied, other), 4.5 / math.sqrt(4.5 * 5))


def test_ties_at_the_threshold():
    step = 2.0**-8  # of bfloat16 just below 1
    scores = torch.tensor([1 - step, 1 - step, 1 - 2 * step, 1 - 2 * step - 2.0**-24, 0.5, 1 - 4 * step])
    assert near_threshold(scores, 3, 23) == 2
    assert near_threshold(scores, 3, 7) == 4
    assert near_threshold(scores, 6, 7) == 1
    assert near_threshold(torch.tensor([1.0, 0.0, 0.0]), 2, 23) == 2
    saturated = compare({"a": pattern([[1, 1, 1, 0.99], [1, 0.5, 0.25, 0]])})["patterns"]["a"]
    assert saturated["distinct"] == 5
    thresholds = {entry["share"]: entry for entry in saturated["thresholds"]}
    assert thresholds[0.25]["score"] == 1 and thresholds[0.25]["near"] == {"float32": 4, "bfloat16": 4}
    assert thresholds[0.75]["heads"] == 6 and thresholds[0.75]["near"] == {"float32": 1, "bfloat16": 1}


def test_all_pairs():
    found = compare({"a": A, "b": B, "c": A})
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [entry["overlap"] for entry in found["pairs"][1]["overlaps"]] == [1, 1, 1, 1]
    assert found["patterns"]["b"]["method"] == "needle"


def test_refusals():
    with pytest.raises(SurgeryError, match="no patterns"):
        compare({})
    with pytest.raises(SurgeryError, match="b has 1 layers of 2 KV heads and a 2 of 4"):
        compare({"a": A, "b": pattern([[1, 2]])})
    for share in (0, 0.01, 1.2):
        with pytest.raises(SurgeryError, match=f"share {share} of 8 heads"):
            compare({"a": A}, shares=(share,))


def test_heat_map(tmp_path):
    figure = head_maps({"a $x$": A, "b": B, "tall": pattern([[i, 2 * i] for i in range(40)])}, share=0.25)
    panels = [ax for ax in figure.axes if ax.get_title(loc="left")]
    assert [ax.get_title(loc="left") for ax in panels] == [r"a \$x\$", "b", "tall"]  # no mathematics
    shown, scores = panels[1].collections[0].get_array().reshape(2, 4), B.scores.numpy()
    assert shown.data == pytest.approx((scores - scores.min()) / (scores.max() - scores.min()))
    assert panels[1].get_title(loc="right") == f"{scores.min():.3g} to {scores.max():.3g}"
    outlined = [(round(box.get_y() + 0.44), round(box.get_x() + 0.44)) for box in panels[1].patches]
    assert outlined == [(0, 0), (0, 2)]
    assert all(box.get_edgecolor()[:3] == pytest.approx((0xD5 / 255, 0x5E / 255, 0)) for box in panels[1].patches)
    assert LIMIT_COLOUR == "#d55e00"
    path = save_head_maps(tmp_path / "map.png", {"a": A})
    assert path.read_bytes() == save_head_maps(tmp_path / "again.png", {"a": A}).read_bytes()
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SurgeryError, match="cannot write"):
        save_head_maps(tmp_path / "nowhere" / "map.png", {"a": A})


def test_heat_map_of_equal_scores():
    (panel, *_) = head_maps({"flat": pattern([[1, 1], [1, 1]])}).axes
    assert panel.collections[0].get_array().ravel().tolist() == [0, 0, 0, 0] and not panel.patches
