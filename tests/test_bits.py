"""`--bits` with another structure: one conversion that ends in a quantized cache, and is the two steps one by one."""

import json

import pytest
import torch
from conversions import convert_checkpoint
from safetensors.torch import load_file
from tiny_models import HELD_OUT, tokens
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.model import remote_code_files
from surgery.structures.dry_run import plan_conversion
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.structures.registry import find_target

WEIGHTS_ONLY = {"calibration": "none", "group": 16}
STRUCTURES = {
    "mla": {"kv_lora_rank": 12, "rope_dim": 4},
    "gqa": {"kv_heads": 1},
    "lowrank": {"rank": 24},
    "hybrid": {"streaming": 1.0, "sinks": 2, "recent": 6},
}


def convert(to, source, out, **settings):
    target = find_target(to)
    return convert_checkpoint(source, out, target.settings(settings))


# A rotation mixes latents, or values of heads.
@pytest.mark.parametrize(
    ("to", "bits", "hadamard"),
    [
        ("mla", 4, False),
        ("gqa", "fp8", True),
        ("lowrank", "fp8", True),
        ("hybrid", 4, False),
        pytest.param("mla", "fp8", True, marks=pytest.mark.slow),
        pytest.param("lowrank", 4, False, marks=pytest.mark.slow),
        pytest.param("gqa", 4, False, marks=pytest.mark.slow),
        pytest.param("hybrid", "fp8", True, marks=pytest.mark.slow),
    ],
)
def test_one_conversion_is_the_two_steps(checkpoints, tmp_path, to, bits, hadamard):
    request = STRUCTURES[to]
    source, codes = checkpoints("llama_bias", torch.float32), {"bits": bits, "hadamard": hadamard, **WEIGHTS_ONLY}
    result = convert(to, source, tmp_path / "out", **request, **codes)
    carrier = {"carrier": "own"} if to == "mla" else {}
    structure = convert(to, source, tmp_path / "structure", calibration="none", **request, **carrier)
    steps = convert_checkpoint(structure.path, tmp_path / "steps", QuantizedSettings(**codes))
    one, two = (load_file(path / "model.safetensors") for path in (result.path, steps.path))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    configs = [json.loads((path / "config.json").read_text()) for path in (result.path, steps.path)]
    assert configs[0] == configs[1]
    for path in (result.path, steps.path):
        files = {file.name for file in path.glob("*.py")}
        assert files == {file.name for file in remote_code_files(configs[0]["auto_map"])}

    report, alone = result.report, structure.report
    assert report.target["to"] == alone.target["to"] and report.target["model_type"] == "surgery"
    assert report.kv["measured_bytes_per_token"] == report.kv["predicted_bytes_per_token"]
    assert report.kv["measured_bytes_per_token"] == steps.report.kv["measured_bytes_per_token"]
    assert report.kv["source_bytes_per_token"] == alone.kv["source_bytes_per_token"]
    assert report.target["numbers_bytes_per_token"] == alone.kv["measured_bytes_per_token"]
    stages = [row["stage"] for row in report.ladder]
    assert stages[-2:] == ["quantized", "reloaded"] and ("hadamard" in stages) == hadamard
    assert all(0 < layer.measured["quantized"] < 0.5 for layer in report.layers)

    model = AutoModelForCausalLM.from_pretrained(result.path).eval()
    with torch.no_grad():
        cache = model(tokens()).past_key_values
    assert cache_bytes(cache) == model.kv_cache_bytes(2, 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "steps", "structure"]


def test_losses_of_all_stages_stand_in_one_report(checkpoints, tmp_path):
    text = {"calibration_tokens": 256, "calibration_length": 64, "held_out": 2, "calibration": str(HELD_OUT)}
    settings = {"method": "cascade", "group_size": 2, "rank": 24, "bits": 4, "group": 16}
    report = convert("crosslayer", checkpoints("llama"), None, **settings, **text).report
    losses = {row["stage"]: row["loss"] for row in report.ladder}
    assert list(losses) == ["source", "low rank", "quantized", "reloaded"]
    assert (
        losses["quantized"] == pytest.approx(losses["reloaded"], abs=1e-6) and losses["quantized"] != losses["low rank"]
    )
    assert report.target["kv_cache"]["format"] == "int4" and report.source["model_type"] == "llama"


def test_what_holds_no_codes_is_refused_before_any_work():
    for to, settings, message in (
        ("crosslayer", {"method": "xkv", "bits": 4}, "cascade"),
        ("mla", {"carrier": "stock", "bits": 4}, "stock"),
        ("gqa", {"carrier": "decilm", "bits": 4}, "DeciLM"),
        ("lowrank", {"hadamard": True}, "give bits"),
        ("hybrid", {"streaming_bits": 2}, "give bits"),
        ("lowrank", {"bits": 5}, "choose 8, 4, 3, 2"),
        ("lowrank", {"bits": 2, "group": 6}, "whole bytes"),
    ):
        with pytest.raises(SurgeryError, match=message):
            find_target(to).settings(settings)


def test_a_dry_run_knows_the_bytes(checkpoints, tmp_path):
    target, request = find_target("mla"), {**STRUCTURES["mla"], "bits": 4, **WEIGHTS_ONLY}
    plan = plan_conversion(checkpoints("llama", torch.bfloat16), tmp_path / "out", target.settings(request))
    # Two layers of 16 numbers: half a byte each, and a scale and a zero for 16 tokens or 4 rotated channels.
    assert plan.kv["bytes_per_token"] == 2 * (16 / 2 + 12 * 4 / 16 + 4)
    assert plan.target["model_type"] == "surgery" and not (tmp_path / "out").exists()


def test_the_budget_in_words(checkpoints, capsys):
    from surgery.console.conversion import show_conversion

    result = convert("lowrank", checkpoints("llama"), None, rank=24, bits=4, **WEIGHTS_ONLY)
    show_conversion(result)
    output = capsys.readouterr().out
    assert "numbers kept" in output and "as int4" in output
    assert result.path.name.endswith("-lowrank-int4")
    assert "24 latents as int4 in groups of 16" in (result.path / "README.md").read_text()


@pytest.mark.parametrize("rope_bits", [16, 8])
def test_rotated_keys_in_bits_of_their_own(checkpoints, tmp_path, rope_bits):
    codes = {"bits": 4, "rope_bits": rope_bits, "sinks": 2, **WEIGHTS_ONLY}
    result = convert("mla", checkpoints("qwen3", torch.bfloat16), tmp_path / "out", **STRUCTURES["mla"], **codes)
    kv = result.report.kv
    at = kv["measured_at_tokens"]
    whole = (at - 2) // 16 * 16
    # Of each of two layers: 12 latents by channel, 4 rotary dimensions and a key norm's 2 by token, the rest exact.
    latents = 12 / 2 + 12 * 4 / 16
    rope = 6 * 2 if rope_bits == 16 else 6 + 4
    assert kv["measured_bytes_per_token"] * at == 2 * (whole * (latents + rope) + (at - whole) * 18 * 2)
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"]
