"""Weights that are not finite, or so large that the model overflows: one line that names the tensor."""

import shutil
from itertools import product

import pytest
from command_line import run_main
from safetensors.torch import load_file, save_file
from tiny_models import HELD_OUT

from surgery.structures.mla.settings import ConvertSettings

TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "projection": "model.layers.1.self_attn.q_proj.weight",
    "input norm": "model.layers.1.input_layernorm.weight",
    "second norm": "model.layers.0.post_attention_layernorm.weight",
    "MLP": "model.layers.1.mlp.down_proj.weight",
    "final norm": "model.norm.weight",
}
HEADS = "heads.safetensors"
SHORT = ("--calibration", HELD_OUT, "--calibration-tokens", 512, "--calibration-length", 128)
COMMANDS = {
    "low rank": ("convert", "bad", "--to", "lowrank", "--kv-ratio", 0.5, "--out", "out", *SHORT),
    "MLA": ("convert", "bad", "--to", "mla", "--kv-ratio", 0.5, "--out", "out", "--calibration", "none"),
    "heads": ("heads", "bad", "--method", "induction", "--length", 200, "--sinks", 4, "--window", 32, "--out", HEADS),
    "eval": ("eval", "bad", "--tasks", "loss", "--length", 64, "--windows", 2, "--device", "cpu", "--out", "results"),
    "verify": ("verify", "bad"),
}
QUICK = [("low rank", tensor, value) for tensor in TENSORS for value in ("nan", "1e38")]
QUICK += [(command, "MLP", "1e38") for command in COMMANDS if command != "low rank"]
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in product(COMMANDS, TENSORS, ("inf", "nan", "1e38"))
]


def make_bad(folder, tensor, value):
    tensors = load_file(folder / "model.safetensors")
    values = tensors[TENSORS[tensor]]
    values[100 : 400 if tensor == "embedding" else 102] = float(value)
    values[1] = float(value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("command", "tensor", "value"), CASES)
def test_the_tensor_is_named(monkeypatch, capsys, checkpoints, tmp_path, command, tensor, value):
    shutil.copytree(checkpoints("llama"), tmp_path / "bad")
    make_bad(tmp_path / "bad", tensor, value)
    monkeypatch.chdir(tmp_path)
    code, _, errors = run_main(monkeypatch, capsys, *COMMANDS[command], "--quiet")
    assert code in (0, 1) and "Traceback" not in errors, errors
    if code == 0 and command == "heads":  # which looks at queries and keys
        assert all(values.isfinite().all() for values in load_file(HEADS).values())
        return
    if code == 0:
        assert value == "1e38" and tensor == "final norm"
        return
    line = errors.strip().splitlines()[-1]
    module = TENSORS[tensor].removesuffix(".weight").rpartition(".")[2]
    assert line.startswith("surgery: error: ") and module in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [1e18, 1e38])
def test_logits_that_are_all_zero(conversions, monkeypatch, capsys, tmp_path, value):
    """A norm of huge hidden states gives zeros, and every difference of logits is then a multiple of nothing."""
    settings = ConvertSettings(kv_ratio=0.5, calibration="none")
    shutil.copytree(conversions("llama", settings).path, tmp_path / "bad")
    make_bad(tmp_path / "bad", "MLP", value)
    code, out, errors = run_main(monkeypatch, capsys, "verify", tmp_path / "bad", "--json")
    assert code == 1 and "Traceback" not in out + errors
