"""The figures of docs/planning.md are those of the conversions that were measured."""

import random
from pathlib import Path
from statistics import fmean

import pytest
from project_tools import tool

ROOT = Path(__file__).resolve().parents[2]


ROWS = {
    "builtin": "demo model",
    "mha": "MHA model",
    "smollm2": "SmolLM2-135M-Instruct",
    "builtin, written": "demo model's written conversions",
    "smollm2, written": "SmolLM2-135M-Instruct's written conversions",
    None: "together",
}


accuracy = tool("planning_accuracy")


def test_rivals_are_taken_on_other_texts_than_they_are_compared_on():
    def line(rng: random.Random, mean: float = 0.0) -> dict[str, str]:
        return {"by_text": " ".join(str(rng.gauss(mean, 1)) for _ in range(32))}

    def mean(of: dict[str, str]) -> float:
        return fmean(map(float, of["by_text"].split()))

    lucky, fair = [], []
    for rng in map(random.Random, range(12)):
        choice, *rivals = (line(rng) for _ in range(40))  # none is better than another
        lucky.append(mean(choice) - min(map(mean, rivals)))
        fair.append(accuracy.lead(choice, rivals)["measured"])
    assert fmean(lucky) > 0.25 and abs(fmean(fair)) < 0.1
    assert accuracy.lead(choice, [*rivals, line(rng, -5.0)])["measured"] == pytest.approx(5, abs=0.5)


@pytest.mark.parametrize(("model", "row"), ROWS.items())
def test_the_table_is_what_was_measured(model, row):
    lines = [line for line in accuracy.read(ROOT / "docs" / "planning-accuracy.csv") if model in (None, line["model"])]
    if shown := {"builtin": "demo", "mha": "MHA", "smollm2": "SmolLM2"}.get(model):  # and the choices
        table = accuracy.table(lines).replace(f"| {model} |", f"| {shown} |")
        assert table in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    found = accuracy.facts(lines)
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8").splitlines()
    cells = next(line for line in page if line.startswith(f"| {row},")).strip("| ").split(" | ")[1:]
    assert cells == [
        str(found["conversions"]),
        f"{found['rank_correlation']:.2f}",
        *(f"{found[name]:.0%}" for name in ("median_relative_error", "within", "held")),
    ]
