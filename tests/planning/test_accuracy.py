"""The figures of docs/planning.md are those of the conversions that were measured."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


ROWS = {
    "builtin": "demo model",
    "mha": "MHA model",
    "smollm2": "SmolLM2-135M-Instruct",
    "builtin, written": "demo model's written conversions",
    "smollm2, written": "SmolLM2-135M-Instruct's written conversions",
    None: "together",
}


@pytest.mark.parametrize(("model", "row"), ROWS.items())
def test_the_table_is_what_was_measured(model, row):
    spec = importlib.util.spec_from_file_location("planning_accuracy", ROOT / "tools" / "planning_accuracy.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    lines = [line for line in tool.read(ROOT / "docs" / "planning-accuracy.csv") if model in (None, line["model"])]
    if shown := {"builtin": "demo", "mha": "MHA", "smollm2": "SmolLM2"}.get(model):  # and the choices
        table = tool.table(lines).replace(f"| {model} |", f"| {shown} |")
        assert table in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    found = tool.facts(lines)
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8").splitlines()
    cells = next(line for line in page if line.startswith(f"| {row},")).strip("| ").split(" | ")[1:]
    assert cells == [
        str(found["conversions"]),
        f"{found['rank_correlation']:.2f}",
        *(f"{found[name]:.0%}" for name in ("median_relative_error", "within", "held")),
    ]
