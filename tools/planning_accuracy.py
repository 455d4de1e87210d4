"""Compares what `surgery plan` expects with what conversions lose, on other text, decoding token by token.

python tools/planning_accuracy.py builtin work/            # plans, converts and measures; goes on where it was stopped
python tools/planning_accuracy.py --draw docs/planning-accuracy.svg work/*.csv

Every candidate of plans for a half, a quarter, an eighth and a sixteenth of the KV bytes is converted without a fit,
and read through its cache on held-out windows that no plan saw. A line a conversion goes to <work>/<model>.csv.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import surgery
from surgery.structures.registry import find_target

SHARES = (0.5, 0.25, 0.125, 0.0625)
LENGTH, WINDOWS = 512, 24
TEXT = {"calibration_length": LENGTH, "held_out": 8}
NAMES = ("model", "command", "kv_ratio", "predicted", "low", "high", "measured", "measured_low", "measured_high")


def plan_rows(model: str, work: Path) -> list[Any]:
    """The candidates of all plans, each once."""
    text = {**TEXT, "keep_statistics": str(work / "statistics"), "context": str(LENGTH)}
    found = {}
    for share in SHARES:
        for row in surgery.plan(model, kv_ratio=share, **text).rows:
            found.setdefault(row.command, row)
    return list(found.values())


def measured(model: str, row: Any, work: Path) -> dict[str, float]:
    """Nats per token over the source's, decoding, with a 95% interval by window."""
    asked = dict(row.asked)
    settings = find_target(row.to).settings_class
    asked |= {"fit_steps": 0} if hasattr(settings, "fit_steps") else {}
    text = {**TEXT, "keep_statistics": str(work / "statistics")}
    with tempfile.TemporaryDirectory() as folder:
        surgery.convert(model, to=row.to, out=Path(folder) / "made", **asked, **text)
        report = surgery.evaluate(
            {"made": Path(folder) / "made"},
            baseline=model,
            tasks=("loss",),
            variants=(),
            length=LENGTH,
            decoded=LENGTH - 2,
            windows=WINDOWS,
            out=Path(folder) / "report",
        )
    source, result = (each["results"]["loss"]["cached"] for each in report.report["rows"])
    differences = [a - b for a, b in zip(result["per_sequence"], source["per_sequence"], strict=True)]
    mean = sum(differences) / len(differences)
    spread = 1.96 * math.sqrt(sum((d - mean) ** 2 for d in differences) / (len(differences) - 1) / len(differences))
    return {"measured": mean, "measured_low": mean - spread, "measured_high": mean + spread}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="FILE")
    parser.add_argument("given", nargs="+", metavar="MODEL WORK | CSV")
    asked = parser.parse_args()
    if asked.draw:
        draw([line for path in asked.given for line in read(Path(path))], asked.draw)
        return
    model, work = asked.given[0], Path(asked.given[1])
    work.mkdir(parents=True, exist_ok=True)
    path = work / f"{Path(model).name}.csv"
    done = {line["command"] for line in read(path)} if path.exists() else set()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        if not done:
            writer.writeheader()
        for row in plan_rows(model, work):
            if row.command not in done:
                expected = {"kv_ratio": row.kv_ratio, "predicted": row.loss_increase, "low": row.low, "high": row.high}
                writer.writerow({"model": model, "command": row.command, **expected, **measured(model, row, work)})
                file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, numbers as numbers."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [{name: value if name in NAMES[:2] else float(value) for name, value in line.items()} for line in lines]


def facts(lines: list[dict[str, Any]]) -> dict[str, float]:
    """How good predictions were: rank correlation, median error, errors within the bounds that are asked for."""
    predicted, found = [line["predicted"] for line in lines], [line["measured"] for line in lines]
    errors = [abs(p - m) for p, m in zip(predicted, found, strict=True)]
    # An increase of less than 0.01 nats is within the noise of the texts.
    near = [error <= max(0.2 * abs(m), 0.01) for error, m in zip(errors, found, strict=True)]
    relative = [error / m for error, m in zip(errors, found, strict=True) if m > 0.05]
    return {
        "conversions": len(lines),
        "rank_correlation": correlation(ranks(predicted), ranks(found)),
        "median_error": median(errors),
        "median_relative_error": median(relative),
        "within": sum(near) / len(near),
    }


def ranks(values: list[float]) -> list[float]:
    """Places in their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(place)) for place in range(len(values))]


def correlation(a: list[float], b: list[float]) -> float:
    """Pearson's."""
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    both = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return both / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Predicted against measured, both in logarithms, and the numbers of `facts` on the screen."""
    import matplotlib
    from matplotlib.figure import Figure

    from surgery.eval.report.style import INK, PALETTE, STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 4.8), layout="constrained")
        axes = figure.subplots()
        for colour, model in zip(PALETTE, dict.fromkeys(line["model"] for line in lines), strict=False):
            points = [(max(x["predicted"], 1e-4), max(x["measured"], 1e-4)) for x in lines if x["model"] == model]
            axes.plot(*zip(*points, strict=True), "o", color=colour, label=model, markersize=4)
        axes.set(xscale="log", yscale="log", xlabel="predicted increase, nats per token", ylabel="measured")
        limits = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
        axes.plot(limits, limits, color=INK, linewidth=0.8, linestyle=":")
        axes.legend()
        figure.savefig(path)
    print({name: round(value, 4) for name, value in facts(lines).items()})


if __name__ == "__main__":
    main()
