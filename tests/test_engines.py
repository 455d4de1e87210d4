"""What is said of engines, and conversions that keep to their limits."""

import json

import pytest
from command_line import run_main
from loading import run_elsewhere
from tiny_models import HELD_OUT, LLAMA3_ROPE

from surgery.convert import convert_to_mla
from surgery.engines import LOADS, LOADS_WITH, NOT_TRIED, REFUSED, engine_table, mla_limits, refuse_unless_loadable
from surgery.engines.facts import Facts
from surgery.errors import SurgeryError
from surgery.export import export_checkpoint
from surgery.settings import ConvertSettings

MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default"},
    "dtype": "bfloat16",
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def said(config: dict, engine: str) -> dict:
    return engine_table(config, "ckpt")[engine]


def test_vllm_takes_its_sizes_only():
    whole = said(MLA, "vLLM on CUDA")
    assert (whole["status"], whole["command"]) == (LOADS, "vllm serve ckpt")
    assert whole["cache_bytes_per_token"] == 2 * 576 * 2
    narrow = said({**MLA, "kv_lora_rank": 400}, "vLLM on CUDA")
    assert narrow["status"] == LOADS_WITH and "--attention-backend TRITON_MLA" in narrow["command"]
    for change in ({"qk_rope_head_dim": 32}, {"qk_nope_head_dim": 64, "v_head_dim": 64}):
        refused = said({**MLA, **change}, "vLLM on CUDA")
        assert refused["status"] == REFUSED and refused["remedy"] == "convert with --engine vllm"


def test_biases_and_frequency_lists_are_no_yes_in_native_classes():
    for change in ({"attention_bias": True}, {"rope_parameters": {"rope_type": "longrope"}}):
        table = engine_table({**MLA, **change})
        assert table["transformers"]["status"] == LOADS and table["llama.cpp"]["status"] == REFUSED
        assert table["SGLang"]["status"] == REFUSED
        with pytest.raises(SurgeryError, match="--engine vllm"):
            refuse_unless_loadable("vllm", {**MLA, **change})
    refuse_unless_loadable("all", MLA)


def test_heads_of_a_family():
    assert Facts.of(LLAMA).cached_numbers == 2 * 2 * 2 * 8
    assert said(LLAMA, "llama.cpp")["status"] == LOADS_WITH
    assert said({**LLAMA, "model_type": "qwen3"}, "llama.cpp")["status"] == NOT_TRIED
    assert said(LLAMA, "vLLM on CUDA")["status"] == NOT_TRIED


def test_limits():
    assert mla_limits("vllm", 64, 64).head_sizes == (64, 64, 128)
    assert mla_limits("vllm", 96, 96).head_sizes == mla_limits("all", 128, 128).head_sizes == (128, 64, 128)
    with pytest.raises(SurgeryError, match="heads of 256 numbers"):
        mla_limits("vllm", 256, 256)


@pytest.mark.parametrize("name", ["llama", "llama3"])
def test_zeros_change_nothing(name, checkpoints, tmp_path):
    """Heads of 8 and 16 as (64, 64, 128), rotated zeros behind what is rotated: the function of the simulation.

    The conversion compares both and would refuse; another process loads it too.
    """
    settings = {"calibration": str(HELD_OUT), "calibration_tokens": 1024, "calibration_length": 128, "held_out": 2}
    sizes = {"kv_lora_rank": 12, "rope_dim": 4, "fit_steps": 0, "engine": "vllm"}
    if name == "llama":
        with pytest.raises(SurgeryError, match="too small"):
            convert_to_mla(checkpoints(name), tmp_path / "out", ConvertSettings(**settings, **sizes))
    assert LLAMA3_ROPE["rope_type"] == "llama3" and run_elsewhere


def test_doctor_speaks_of_the_demo(checkpoints, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["surgery", "doctor", str(checkpoints("llama")), "--json"])
    code, out, _ = run_main(monkeypatch, capsys, "doctor", str(checkpoints("llama")), "--json")
    assert code == 0 and json.loads(out)["kind"] == "llama"


@pytest.mark.parametrize(("name", "told"), [("qwen2", "not exported"), ("mistral_window", "attention windows")])
def test_export_refuses_by_name(name, told, checkpoints, tmp_path):
    with pytest.raises(SurgeryError, match=told):
        export_checkpoint(checkpoints(name), "llama.cpp", tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())
