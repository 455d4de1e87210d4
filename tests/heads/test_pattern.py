"""The pattern file, its picture, and files of other projects."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from surgery.common.errors import SurgeryError
from surgery.heads.heat_map import head_map, save_head_map
from surgery.heads.import_patterns import read_pattern
from surgery.heads.pattern import KEY, HeadPattern


def make_pattern(**changes):
    generator = torch.Generator().manual_seed(0)
    scores, spread = torch.randn(3, 4, generator=generator), torch.rand(3, 4, generator=generator)
    parts = {"copy": torch.rand(3, 8, generator=generator), "steps": torch.arange(5)}
    own = {"scores": scores, "method": "needle", "sinks": 16, "recent": 112, "spread": spread, "parts": parts}
    own |= {"settings": {"length": 1024, "text": "builtin", "samples": None}, "facts": {"needles": 7}}
    own |= {"model": {"name": "démo", "sha256": "cd" * 32, "config_sha256": "ef" * 32}, "data_sha256": "ab" * 32}
    own |= {"seeds": (0, 1), "seconds": 1.25, "versions": {"torch": "2.13"}}
    return HeadPattern(**{**own, **changes})


def test_round_trip(tmp_path):
    pattern = make_pattern()
    path = pattern.save(tmp_path / "a.safetensors")
    back = HeadPattern.load(path)
    for name in ("scores", "spread"):
        assert torch.equal(getattr(back, name), getattr(pattern, name))
    assert list(back.parts) == ["copy", "steps"]
    assert all(torch.equal(back.parts[name], part) for name, part in pattern.parts.items())
    plain = ("method", "sinks", "recent", "settings", "facts", "data_sha256", "model", "seeds", "seconds", "versions")
    for name in plain:
        assert getattr(back, name) == getattr(pattern, name), name
    assert back.sha256 == pattern.sha256
    assert load_file(path)["scores"].shape == (3, 4)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert path.read_bytes() == back.save(tmp_path / "b.safetensors").read_bytes()
    pattern = HeadPattern(torch.ones(1, 2), "duo")
    back = HeadPattern.load(pattern.save(tmp_path / "c.safetensors"))
    assert back.spread is None and back.sinks is None and back.parts == {} and back.seeds == ()


def test_hash_is_of_the_scores_and_their_shape():
    pattern = make_pattern()
    assert pattern.sha256 == make_pattern(method="duo", spread=None).sha256
    assert pattern.sha256 != make_pattern(scores=pattern.scores.T.contiguous().view(3, 4)).sha256
    assert HeadPattern(torch.ones(2, 3), "duo").sha256 != HeadPattern(torch.ones(3, 2), "duo").sha256


def test_an_existing_file_is_replaced_only_if_asked(tmp_path):
    path = make_pattern().save(tmp_path / "a.safetensors")
    other = HeadPattern(torch.zeros(2, 2), "duo")
    with pytest.raises(SurgeryError, match="exists; choose another --out or pass --overwrite"):
        other.save(path)
    assert HeadPattern.load(path).method == "needle"
    other.save(path, overwrite=True)
    assert HeadPattern.load(path).method == "duo"


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = make_pattern().save(tmp_path / "a.safetensors")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SurgeryError, match="no space left"):
        HeadPattern(torch.zeros(2, 2), "duo").save(path, overwrite=True)
    with pytest.raises(SurgeryError, match="no space left"):
        make_pattern().save(tmp_path / "b.safetensors")
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert HeadPattern.load(path).method == "needle"


def test_refusals_at_saving(tmp_path):
    with pytest.raises(SurgeryError, match="is a folder"):
        make_pattern().save(tmp_path)
    with pytest.raises(SurgeryError, match="No such file"):
        make_pattern().save(tmp_path / "nowhere" / "a.safetensors")
    for facts in ({"x": torch.ones(1)}, {"x": float("nan")}):
        with pytest.raises(SurgeryError, match="that JSON cannot hold"):
            make_pattern(facts=facts).save(tmp_path / "a.safetensors")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "scores, reason",
    [
        (torch.ones(2, 2, dtype=torch.bfloat16), "torch.bfloat16"),
        (torch.ones(4), "must be float32"),
        (torch.ones(0, 4), "must be float32"),
        (torch.tensor([[1.0, 2.0], [3.0, float("nan")]]), "layer 1, KV head 1"),
        (torch.tensor([[float("inf"), 2.0]]), "layer 0, KV head 0"),
    ],
)
def test_scores_that_are_none(scores, reason):
    with pytest.raises(SurgeryError, match=reason):
        HeadPattern(scores, "duo")


def test_other_values_that_are_none():
    with pytest.raises(SurgeryError, match="spread"):
        make_pattern(spread=torch.ones(2, 2))
    for name, value in (("sinks", -1), ("recent", 0), ("recent", 1.5), ("sinks", True)):
        with pytest.raises(SurgeryError, match=f"{name} of a pattern"):
            make_pattern(**{name: value})


def save_header(path, header, scores=None):
    scores = torch.ones(2, 2) if scores is None else scores
    save_file({"scores": scores}, path, {KEY: header if isinstance(header, str) else json.dumps(header)})


def test_files_that_are_none(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(SurgeryError, match="no such file"):
        HeadPattern.load(path)
    path.write_bytes(b"anything else")
    with pytest.raises(SurgeryError, match="not a readable pattern"):
        HeadPattern.load(path)
    whole = make_pattern().save(tmp_path / "b.safetensors").read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(SurgeryError, match="not a readable pattern"):
        HeadPattern.load(path)
    save_file({"scores": torch.ones(2, 2)}, path)
    with pytest.raises(SurgeryError, match="not a head pattern"):
        HeadPattern.load(path)
    for header, reason in (
        ("{", "not a readable pattern"),
        ([], "not a head pattern"),
        ({"format": 9, "method": "duo"}, "unknown pattern format"),
        ({"format": 1}, "damaged pattern header"),
        ({"format": 1, "method": "duo", "color": "red"}, "damaged pattern header"),
        ({"format": 1, "method": "duo", "recent": "many"}, "recent of a pattern"),
    ):
        save_header(path, header)
        with pytest.raises(SurgeryError, match=reason) as refusal:
            HeadPattern.load(path)
        assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)
    save_header(path, {"format": 1, "method": "duo"}, torch.full((2, 2), float("nan")))
    with pytest.raises(SurgeryError, match="not finite"):
        HeadPattern.load(path)


def test_ranking_and_full_heads():
    pattern = HeadPattern(torch.tensor([[0.5, 0.1], [0.9, 0.5], [0.5, -1.0]]), "duo")
    assert pattern.ranking() == [(1, 0), (0, 0), (1, 1), (2, 0), (0, 1), (2, 1)]
    assert pattern.full_heads(0.5).tolist() == [[True, False], [True, True], [False, False]]
    assert pattern.full_heads(0.25).sum() == 2  # one and a half
    assert not pattern.full_heads(0).any() and pattern.full_heads(1).all()
    with pytest.raises(SurgeryError, match="from 0 to 1"):
        pattern.full_heads(1.1)


# Pictures


def test_heat_map(tmp_path):
    pattern = HeadPattern(torch.tensor([[0.9, 0.1, 0.8, 0.2], [0.0, 0.3, 0.1, 0.4]]), "a $x$", 0, 1)
    panel = head_map(pattern).axes[0]
    assert panel.get_title(loc="left") == r"a \$x\$"  # no mathematics
    output, scores = panel.collections[0].get_array().reshape(2, 4), pattern.scores.numpy()
    assert output.data == pytest.approx((scores - scores.min()) / (scores.max() - scores.min()))
    assert panel.get_title(loc="right") == "0 to 0.9"
    assert [(round(box.get_y() + 0.44), round(box.get_x() + 0.44)) for box in panel.patches] == [(0, 0), (0, 2)]
    path = save_head_map(tmp_path / "map.png", pattern)
    assert path.read_bytes() == save_head_map(tmp_path / "again.png", pattern).read_bytes()
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SurgeryError, match="cannot write"):
        save_head_map(tmp_path / "nowhere" / "map.png", pattern)
    panel = head_map(HeadPattern(torch.ones(2, 2), "flat")).axes[0]
    assert panel.collections[0].get_array().ravel().tolist() == [0, 0, 0, 0]


# Other projects'


def test_gates_of_duoattention(tmp_path):
    gates = np.array([[1.0, -9.584426879882812e-05, 0.984375], [0.55859375, 1.0, 0.0]])
    np.savetxt(tmp_path / "full_attention_heads.tsv", gates, delimiter="\t")
    config = {"sink_size": 128, "recent_size": 256, "model_name": "models/some", "deploy_sink_size": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "full_attention_heads.tsv"):
        pattern = read_pattern(path)
        assert np.array_equal(pattern.scores.numpy(), gates.astype(np.float32))
        assert (pattern.method, pattern.sinks, pattern.recent) == ("duo", 128, 256)
        assert pattern.model == {"name": "models/some"}
    pattern.save(tmp_path / "ours.safetensors")
    assert read_pattern(tmp_path / "ours.safetensors").sha256 == pattern.sha256


def test_masks_of_prulong(tmp_path):
    """Write masks as csv.writer does, next to the config of the checkpoint that they were trained in."""
    (tmp_path / "masks_sp0.5.tsv").write_bytes(b"1.0\t0.0\t0.0\r\n0.0\t1.0\t1.0\r\n")
    (tmp_path / "config.json").write_text(json.dumps({"local_window_size": 1024, "sink_size": 128}))
    pattern = read_pattern(tmp_path / "masks_sp0.5.tsv")
    assert pattern.scores.tolist() == [[1, 0, 0], [0, 1, 1]]
    assert (pattern.method, pattern.sinks, pattern.recent) == ("prulong", 128, 1024)
    (tmp_path / "config.json").unlink()  # a table alone says nothing of sinks
    (tmp_path / "x.tsv").write_text("0.25\t1\n")
    pattern = read_pattern(tmp_path / "x.tsv")
    assert pattern.sinks is None and pattern.recent is None and pattern.model == {}


def test_tables_that_are_none(tmp_path):
    path = tmp_path / "x.tsv"
    with pytest.raises(SurgeryError, match="No such file"):
        read_pattern(path)
    for text, reason in (
        ("1\t2\n1\n", "must be a table"),
        ("a\tb\n", "must be a table"),
        ("", "must be float32"),
        ("1\tnan\n", "not finite"),
    ):
        path.write_text(text)
        with pytest.raises(SurgeryError, match=reason):
            read_pattern(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SurgeryError, match="must be a table"):
        read_pattern(path)
    with pytest.raises(SurgeryError, match="contains neither"):
        read_pattern(tmp_path)
