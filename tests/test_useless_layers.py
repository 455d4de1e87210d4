"""A layer whose output error exceeds its output is named on the screen, in the report and on the card."""

import json
import math
from dataclasses import dataclass, field, replace

import pytest
from command_line import run_main

from surgery.reporting.quality import useless_layers
from surgery.structures.mla.structure import MLA

TOLD = "layers 0 (125%)"


@dataclass(frozen=True)
class Layer:
    layer: int | str
    measured: dict = field(default_factory=dict)


def test_the_last_stage_counts():
    errors = [{"truncated": 1.5, "fitted": 0.9}, {"truncated": 0.9, "fitted": 1.01}, {}, {"a": math.nan}, {"a": 1.0}]
    assert useless_layers(map(Layer, range(5), errors)).keys() == {"1", "3"}


@pytest.mark.parametrize("error", (0.5, 1.25))
def test_screen_report_and_card_name_it(error, checkpoints, tmp_path, monkeypatch, capsys):
    def convert_layers(self, work, writer):
        outcome = convert(self, work, writer)
        first, *rest = outcome.layers
        return replace(outcome, layers=[replace(first, measured={"truncated": error}), *rest])

    convert = MLA.convert_layers
    monkeypatch.setattr(MLA, "convert_layers", convert_layers)
    arguments = ["--to", "mla", "--kv-ratio", "0.5", "--calibration", "none", "--out", tmp_path / "out"]
    code, screen, _ = run_main(monkeypatch, capsys, "convert", checkpoints("llama"), *arguments)
    assert code == 0
    target = json.loads((tmp_path / "out" / "surgery_report.json").read_text())["target"]
    assert target.get("useless_layers") == ({"0": 1.25} if error > 1 else None)
    assert (TOLD in screen, TOLD in (tmp_path / "out" / "README.md").read_text()) == (error > 1, error > 1)
