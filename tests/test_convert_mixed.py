"""Layers that become different things: what each part alone makes of its layers stands side by side in one model."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import HELD_OUT
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.heads.pattern import HeadPattern
from surgery.structures import converter
from surgery.structures.dry_run import plan_conversion
from surgery.structures.registry import MIXED, find_target

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 2, "recall": 0.0}
LOW_RANK = {"to": "lowrank", "kv_ratio": 0.4}
QUANTIZED = {"to": "lowrank", "kv_ratio": 0.4, "bits": "auto", "sinks": 3, "group": 16}
MLA = {"to": "mla", "kv_ratio": 0.5, "rope_dim": 4}
HEADS = {"to": "gqa", "kv_heads": 1}
CODES = {"to": "quantized", "bits": 4, "sinks": 3, "group": 16}
STREAMS = {"to": "hybrid", "heads": "a pattern", "streaming": 0.5}
CASES = {
    "latents and heads": [LOW_RANK, HEADS],
    "chosen bits beside codes": [QUANTIZED, CODES],
    "mla beside streaming heads": [MLA, STREAMS],
    "codes beside streaming heads": [STREAMS, QUANTIZED],
    "latents of two kinds": [MLA, LOW_RANK],
    "one part": [QUANTIZED],
}
ALWAYS = ("latents and heads", "codes beside streaming heads")


@pytest.fixture
def parts_of(tmp_path):
    def made(case: str) -> dict:
        parts = CASES[case]
        pattern = tmp_path / "pattern.safetensors"
        HeadPattern(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), "needle", 3, 20).save(pattern)
        parts = [{**part, "layers": [layer]} for layer, part in enumerate(parts)]
        parts = [part | ({"heads": str(pattern)} if "heads" in part else {}) for part in parts]
        return {"parts": parts, "keep": list(range(len(parts), 2)), **TEXT}

    return made


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.slow) for case in CASES]
)
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_what_is_written_is_verified_and_weighs_what_was_foreseen(checkpoints, tmp_path, parts_of, case, family):
    if family == "qwen3" and "heads" in case.split():
        pytest.skip("heads behind a norm are not merged")
    settings = MIXED.settings({**parts_of(case), "fit_steps": 1})
    foreseen = plan_conversion(checkpoints(family), tmp_path / "out", settings)
    made = converter.convert(checkpoints(family), tmp_path / "out", settings)
    report = json.loads((made.path / "surgery_report.json").read_text())
    assert report["target"]["to"] == "mixed" and len(report["layers"]) == 2
    assert foreseen.target["model_type"] == report["target"]["model_type"] == "surgery"
    if "auto" not in str(settings.parts):
        tokens = settings.context or 2**20
        assert foreseen.kv["bytes_per_token"] > 0 and tokens
    model = AutoModelForCausalLM.from_pretrained(made.path).eval()
    ids = torch.arange(3, 43)[None].repeat(2, 1) % model.config.vocab_size
    with torch.no_grad():
        assert cache_bytes(model(ids).past_key_values) == model.kv_cache_bytes(2, 40)
    assert "layers" in (made.path / "README.md").read_text()


def test_a_layer_is_what_its_part_alone_makes_of_it(checkpoints, tmp_path, parts_of):
    asked = {**parts_of("latents and heads"), "fit_steps": 0}
    mixed = converter.convert(checkpoints("llama"), tmp_path / "mixed", MIXED.settings(asked)).path
    for layer, part in enumerate(asked["parts"]):
        own = {name: value for name, value in part.items() if name not in ("to", "layers")} | TEXT | {"fit_steps": 0}
        alone = converter.convert(
            checkpoints("llama"), tmp_path / part["to"], find_target(part["to"]).settings(own)
        ).path
        prefix = f"model.layers.{layer}.self_attn."
        tensors, others = (
            {n: t for n, t in load_file(f / "model.safetensors").items() if n.startswith(prefix)}
            for f in (mixed, alone)
        )
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[name], others[name]) for name in tensors)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "no parts say"),
        ({"parts": [{**LOW_RANK, "layers": [0]}]}, "name 1 layers, and this model has 2"),
        ({"parts": [{**LOW_RANK, "layers": [0, 0]}]}, "layer 0 is named more than once"),
        ({"parts": [{**LOW_RANK, "layers": [1]}]}, "no keep names layer 0"),
        ({"parts": [{**LOW_RANK, "layers": "all"}]}, "layers of a part are numbers"),
        ({"parts": [{"to": "lowrank"}]}, "says to, layers and settings"),
        ({"parts": [{"to": "mixed", "layers": [0, 1]}]}, "a part is one structure"),
        ({"parts": [{"to": "lowrnk", "layers": [0, 1]}]}, "did you mean lowrank"),
        ({"parts": [{"to": "mla", "carrier": "stock", "layers": [0, 1]}]}, "whose layers cannot differ so"),
        ({"parts": [{"to": "crosslayer", "layers": [0, 1]}]}, "crosslayer makes layers that do not stand alone"),
    ],
)
def test_what_is_no_mixture_is_one_line(checkpoints, tmp_path, asked, message):
    with pytest.raises(SurgeryError, match=message):
        converter.convert(checkpoints("llama"), tmp_path / "out", MIXED.settings({**asked, "calibration": "none"}))
