"""The figures of docs/calibration.md on tokens are those of the conversions that were measured."""

from command_line import ROOT
from project_tools import tool

tokens = tool("calibration_tokens")


def test_the_table_is_what_was_measured():
    lines = tokens.read(ROOT / "docs" / "calibration-tokens.csv")
    assert tokens.table(lines) in (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")


def test_what_is_not_measured_is_left_open():
    values = {"model": "m", "to": "mla", "kv_ratio": "0.25", "source": "2.0"}
    at = {6_144: (0.5, 0.4, 0.6), 24_576: (0.25, 0.2, 0.3)}
    lines = [
        {**values, "tokens": n, "increase": increase, "low": low, "high": high}
        for n, (increase, low, high) in at.items()
    ]
    assert tokens.table(lines) == "| m | mla 0.25 | +0.5000 ± 0.1000 |  | +0.2500 ± 0.0500 |  |"
