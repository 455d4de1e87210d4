"""The figures of docs/research/planning.md are those of the conversions that were measured."""

import pytest
from command_line import ROOT
from project_tools import tool

accuracy = tool("planning_accuracy")
RESEARCH = ROOT / "docs" / "research"


@pytest.mark.parametrize(("model", "row"), [("builtin", "demo model"), ("smollm2", "SmolLM2-135M-Instruct")])
def test_the_table_is_what_was_measured(model, row):
    lines = [line for line in accuracy.read(RESEARCH / "planning-accuracy.csv") if line["model"] == model]
    figures = accuracy.facts(lines)
    page = (RESEARCH / "planning.md").read_text(encoding="utf-8").splitlines()
    cells = next(line for line in page if line.startswith(f"| {row},")).strip("| ").split(" | ")[1:]
    assert cells == [
        str(figures["conversions"]),
        f"{figures['rank_correlation']:.2f}",
        *(f"{figures[name]:.0%}" for name in ("median_relative_error", "within", "held")),
    ]
