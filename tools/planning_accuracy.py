"""Compares what `surgery plan` expects with what conversions lose, on other text, decoding token by token.

python tools/planning_accuracy.py builtin work/            # plans, converts and measures; goes on where it was stopped
python tools/planning_accuracy.py --recipe recipes/smollm2.yaml work/   # its conversions, measured by its report
python tools/planning_accuracy.py --draw docs/planning-accuracy.svg work/*.csv

Every candidate of plans for a half to a sixteenth of the KV bytes is converted without a fit,
and read through its cache on held-out windows that no plan saw. A line a conversion goes to <work>/<model>.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import yaml

import surgery
from surgery.calibration.texts import load_texts
from surgery.checkpoint.named_models import model_named
from surgery.common.progress import Progress
from surgery.planning.candidates import Candidates
from surgery.planning.measure import measure
from surgery.planning.plan import opened_work
from surgery.planning.settings import PlanSettings
from surgery.running.source import Source
from surgery.structures.registry import find_target

SHARES = (0.5, 0.35, 0.25, 0.18, 0.125, 0.09, 0.0625)
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


def of_recipe(recipe: Path, work: Path) -> list[dict[str, Any]]:
    """What is expected of a recipe's conversions, beside what its published report measured."""
    steps = yaml.safe_load(recipe.read_text())["steps"]
    report = next(step["eval"] for step in steps if "eval" in step)
    rows = {row["name"]: row for row in json.loads(Path(report["publish"], "report.json").read_text())["rows"]}
    asked = {step["convert"]["name"]: step["convert"] for step in steps if "convert" in step}
    source = next(iter(asked.values()))
    settings = PlanSettings(
        calibration=source["calibration"], held_out=8, context="1k", keep_statistics=str(work / "statistics")
    )
    progress, model = Progress(), model_named(source["source"])
    opened = Source.open(model, settings)
    texts = load_texts(opened, settings, progress, planted=False)
    named = {"source", "name", "to", "keep_statistics", "held_out", "calibration", "fit_steps"}
    with opened_work(opened, settings, texts, progress) as made:
        candidates = Candidates(opened, made, settings)
        sized = {
            name: candidates.sized(find_target(each["to"]), {k: v for k, v in each.items() if k not in named}, None)
            for name, each in asked.items()
        }
        carried = measure(list(sized.values()), made, texts.held_out)
    lines = []
    for (name, each), score in zip(sized.items(), carried.scored, strict=True):
        increase, found = score.beyond(carried.source), rows[name]["comparison"]["loss"]
        values = rows[name]["kv"]["ratio"], increase.mean, increase.low, increase.high
        values += found["difference"], found["low"], found["high"]
        lines.append(dict(zip(NAMES, (source["source"], f"surgery convert {each.name}", *values), strict=True)))
    return lines


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """A line a conversion."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="FILE")
    parser.add_argument("--recipe", type=Path, metavar="FILE")
    parser.add_argument("given", nargs="+", metavar="MODEL WORK | WORK | CSV")
    asked = parser.parse_args()
    if asked.draw:
        draw([line for path in asked.given for line in read(Path(path))], asked.draw)
        return
    work = Path(asked.given[-1])
    work.mkdir(parents=True, exist_ok=True)
    if asked.recipe:
        write(work / f"{asked.recipe.stem}.csv", of_recipe(asked.recipe, work))
        return
    model = asked.given[0]
    path = work / f"{Path(model).name}.csv"
    done = {_asked(line["command"]): line for line in read(path)} if path.exists() else {}
    rows = sorted(plan_rows(model, work), key=lambda row: _asked(row.command) not in done)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        for row in rows:  # those that were measured first, beside what is expected of them now
            expected = {"kv_ratio": row.kv_ratio, "predicted": row.loss_increase, "low": row.low, "high": row.high}
            found = done.get(_asked(row.command)) or measured(model, row, work)
            found = {name: found[name] for name in NAMES[-3:]}
            writer.writerow({"model": model, "command": row.command, **expected, **found})
            file.flush()


def _asked(command: str) -> str:
    """A command without the place of its source."""
    return command.partition(" --to ")[2]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, numbers as numbers."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [{name: value if name in NAMES[:2] else float(value) for name, value in line.items()} for line in lines]


def facts(lines: list[dict[str, Any]]) -> dict[str, float]:
    """How good predictions were: rank correlation, median error, those within a fifth or 0.01 nats, and intervals."""
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
        "held": sum(line["low"] <= m <= line["high"] for line, m in zip(lines, found, strict=True)) / len(lines),
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
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.legend()
        figure.savefig(path)
    print({name: round(value, 4) for name, value in facts(lines).items()})


if __name__ == "__main__":
    main()
