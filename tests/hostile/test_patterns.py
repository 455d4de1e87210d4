"""Head patterns that nobody meant well with: ours, and tables of others."""

import json

import pytest
import torch
from hostile import JUNK, cases, damaged, mutated, taken_or_refused
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save

from surgery.heads.import_patterns import read_pattern
from surgery.heads.pattern import HeadPattern

SCORES = torch.arange(8.0).reshape(2, 4)
HEADER = {"format": 1, "method": "induction", "sinks": 4, "recent": 64, "settings": {"length": 64}}
HEADER |= {"facts": {"prompts": 2}, "model": {"name": "llama", "sha256": "00"}, "versions": {"torch": "2"}}
HEADER |= {"data_sha256": "00", "seeds": [0, 1], "seconds": 1.5}
TENSORS = (SCORES, SCORES.double(), SCORES[0], SCORES * float("nan"), SCORES.new_zeros(0, 4), SCORES.new_zeros(2, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


def used(path):
    """A pattern, and all that conversions, comparisons and recipes take from it."""
    pattern = read_pattern(path)
    assert pattern.full_heads(0.5).sum() == (pattern.layers * pattern.kv_heads + 1) // 2
    document = json.loads(json.dumps(pattern.identity()))
    return dict(pattern.settings), pattern.model.get("sha256"), pattern.model.get("name"), document


def test_a_pattern_without_changes_is_read(folder):
    (folder / "pattern.safetensors").write_bytes(save({"scores": SCORES}, {"surgery_heads": json.dumps(HEADER)}))
    assert used(folder / "pattern.safetensors")[1] == "00"


@given(mutated(HEADER), st.sampled_from(TENSORS), st.sampled_from(TENSORS))
@cases(20)
@example({**HEADER, "settings": [1]}, SCORES, SCORES)
@example({**HEADER, "model": "llama"}, SCORES, SCORES)
@example({**HEADER, "model": None}, SCORES, SCORES)
@example({**HEADER, "scores": [[1.0]]}, SCORES, SCORES)
@example({**HEADER, "seeds": 3}, SCORES, SCORES)
def test_headers(folder, header, scores, spread):
    tensors = {"scores": scores.clone(), "spread": spread.clone()}
    (folder / "pattern.safetensors").write_bytes(save(tensors, {"surgery_heads": json.dumps(header)}))
    taken_or_refused(lambda: used(folder / "pattern.safetensors"))


@given(st.data())
@cases(15)
def test_bytes(folder, data):
    whole = save({"scores": SCORES}, {"surgery_heads": json.dumps(HEADER)})
    (folder / "pattern.safetensors").write_bytes(data.draw(damaged(whole)))
    taken_or_refused(lambda: HeadPattern.load(folder / "pattern.safetensors"))


TABLE = b"0.5\t1.0\n0.25\t0\n"


@given(damaged(TABLE) | st.binary(max_size=40), mutated({"sink_size": 4, "recent_size": 64, "model_name": "x"}) | JUNK)
@cases(20)
@example(b"", {})
@example(b"1e999\t0\n", {})
@example(b"nan\n", {})
@example(TABLE, {"sink_size": {}, "recent_size": []})
def test_tables(folder, content, config):
    (folder / "masks.tsv").write_bytes(content)
    (folder / "config.json").write_text(json.dumps(config))
    taken_or_refused(lambda: used(folder / "masks.tsv"))
