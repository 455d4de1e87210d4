"""Screens of `surgery convert` for every target and method, from the command line as users call it."""

import json
import re
import shutil
from typing import get_args, get_type_hints

import pytest
from command_line import run_main
from tiny_models import DEMO, HELD_OUT, SHAPE, random_model
from transformers import LlamaConfig

from surgery.structures.registry import TARGETS

TEXT = [
    "--calibration", str(HELD_OUT), "--calibration-tokens", "256", "--calibration-length", "64", "--held-out", "1",
    "--device", "cpu",
]  # fmt: skip


def methods(target):
    return get_args(get_type_hints(TARGETS[target].settings_class)["method"])


def by_method(target, *others):
    """A call for every method."""
    return {f"{target} {method}": ["--to", target, "--method", method, *others] for method in methods(target)}


CALLS = {
    **by_method("mla"),
    **by_method("gqa"),
    "gqa by spectrum": ["--to", "gqa", "--allocate", "spectrum", "--kv-ratio", "0.75"],
    **by_method("lowrank", "--kv-ratio", "0.75"),
    "lowrank in bits": ["--to", "lowrank", "--kv-ratio", "0.2", "--bits", "auto"],
    **{
        f"crosslayer {method}": ["--to", "crosslayer", "--method", method, "--group-size", "2"]
        for method in methods("crosslayer")
    },
    "hybrid": ["--to", "hybrid", "--streaming", "1", "--sinks", "4", "--recent", "8"],
    "quantized": ["--to", "quantized", "--bits", "8"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Four layers, as merged pairs of layers begin in the middle; a head_dim of its own, as key-norm wants it."""
    folder = tmp_path_factory.mktemp("four-layers")
    random_model(LlamaConfig(**{**SHAPE, "num_hidden_layers": 4}, head_dim=16)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


# Methods whose tables another of their target prints too.
ALIKE = [f"{target} {method}" for target in ("mla", "lowrank") for method in methods(target) if method != "fisher"]
ALIKE += ["gqa mean-pool"]
TRIED = [pytest.param(call, marks=[pytest.mark.slow] * (call in ALIKE)) for call in CALLS]


@pytest.mark.parametrize("call", TRIED)
def test_every_conversion_is_printed(call, source, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    code, output, err = run_main(monkeypatch, capsys, "convert", source, "--out", out, *CALLS[call], *TEXT)
    assert code == 0, err
    report = json.loads((out / "surgery_report.json").read_text())
    lines = output.splitlines()
    head = next(number for number, line in enumerate(lines) if line.split()[:1] == ["layer"])
    stages = list(report["layers"][0]["measured"])
    columns = re.split(r"\s{2,}", lines[head].strip())
    assert columns[len(columns) - len(stages) :] == stages
    # Below the head and its rule, a line a layer, or a group of them.
    rows = [line.split()[0] for line in lines[head + 2 : head + 2 + len(report["layers"])]]
    assert rows == [str(layer["layer"]) for layer in report["layers"]]

    losses = {row["stage"]: row["loss"] for row in report["ladder"]}
    if "--method" in CALLS[call]:
        assert report["target"]["method"] == CALLS[call][3]
        if report["target"]["to"] == "lowrank":
            assert losses["reloaded"] == pytest.approx(losses["low rank"], abs=1e-4)
            assert report["kv"]["ratio"] <= 0.75
    if call == "gqa key-norm":  # errors that nothing predicts are dashes
        assert any(line.split()[:4] == ["0", "0+1", "-", "-"] for line in lines)
