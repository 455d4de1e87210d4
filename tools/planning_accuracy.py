"""Compare the losses that `surgery plan` predicts for its candidates with their losses on other text.

    python tools/planning_accuracy.py builtin work/             # minutes; SmolLM2 takes hours, fewer with --unseen 4
    python tools/planning_accuracy.py --facts docs/research/planning-accuracy.csv

Every candidate of plans at a half to a sixteenth of the KV bytes is simulated as in a plan: on the texts of a plan's
first two rounds, and on texts that no plan saw. Writes a line per conversion to <work>/<model>.csv and prints the
figures of docs/research/planning.md.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from pathlib import Path
from typing import Any

from surgery.calibration.texts import load_texts
from surgery.checkpoint.named_models import model_named
from surgery.common.progress import Progress
from surgery.planning.candidates import Candidates
from surgery.planning.measure import measure
from surgery.planning.plan import open_work
from surgery.planning.settings import PlanSettings
from surgery.planning.sizes import SHARES
from surgery.running.source import Source

LENGTH = 512
SEEN = 8
"""Texts of a plan, which reads the second half only for candidates that the first half cannot separate."""

Line = dict[str, Any]


def lines_of(model: str, work: Path, unseen: int) -> list[Line]:
    """Return predicted and measured loss increases of candidates at all KV shares, with 95% intervals over texts."""
    text = {"calibration_length": LENGTH, "context": str(LENGTH), "held_out": SEEN + unseen}
    settings, progress = PlanSettings(**text, keep_statistics=str(work / "statistics")), Progress()
    opened = Source.open(model_named(model), settings)
    texts = load_texts(opened, settings, progress, planted=False, held_out_length=settings.text_length)
    of_plan, others = texts.held_out.split(SEEN)
    with open_work(opened, settings, texts, progress) as work_context:
        candidates = Candidates(opened, work_context, settings)
        sized = list({each.name: each for each in candidates.at(SHARES)}.values())
        predicted, measured = (measure(sized, work_context, part) for part in (of_plan.split(SEEN // 2)[0], others))
    lines = []
    for each, own, other in zip(sized, predicted.scored, measured.scored, strict=True):
        expected, actual = own.beyond(predicted.source), increase(other.losses, measured.source.losses)
        lines.append(
            {
                "model": Path(model).name,
                "command": f"surgery convert {Path(model).name} {each.name}",
                "kv_ratio": each.kv_bytes / candidates.source_bytes,
                **{"predicted": expected.mean, "low": expected.low, "high": expected.high},
                **dict(zip(("measured", "measured_low", "measured_high"), actual, strict=True)),
            }
        )
    return lines


def increase(losses: list[float], source: list[float]) -> tuple[float, float, float]:
    """Return the mean loss increase and its 95% interval over texts."""
    differences = [own - other for own, other in zip(losses, source, strict=True)]
    mean, half = statistics.fmean(differences), 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, mean - half, mean + half


def facts(lines: list[Line]) -> dict[str, float]:
    """Return rank correlation, median error, share within 20% or 0.01 nats, and coverage of intervals."""
    pairs = [(float(line["predicted"]), float(line["measured"])) for line in lines]
    # Differences below 0.01 nats are within the noise of the texts.
    near = [abs(p - m) <= max(0.2 * abs(m), 0.01) for p, m in pairs]
    covered = [float(line["low"]) <= m <= float(line["high"]) for line, (_, m) in zip(lines, pairs, strict=True)]
    return {
        "conversions": len(lines),
        "rank_correlation": statistics.correlation(*(ranks(side) for side in zip(*pairs, strict=True))),
        "median_relative_error": statistics.median(abs(p - m) / m for p, m in pairs if m > 0.05),
        "within": statistics.fmean(near),
        "held": statistics.fmean(covered),
    }


def ranks(values: tuple[float, ...]) -> list[float]:
    """Return the rank of each value; ties share the lowest."""
    order = sorted(values)
    return [float(order.index(value)) for value in values]


def read(path: Path) -> list[Line]:
    """Read the lines of a CSV file."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="MODEL WORK | CSV")
    parser.add_argument("--facts", action="store_true", help="print the facts of an existing CSV file")
    parser.add_argument("--unseen", type=int, default=32, metavar="TEXTS", help="unseen texts to measure on")
    options = parser.parse_args()
    if options.facts:
        lines = read(Path(*options.paths))
    else:
        model, work = options.paths[0], Path(options.paths[1])
        work.mkdir(parents=True, exist_ok=True)
        lines = lines_of(model, work, options.unseen)
        with (work / f"{Path(model).name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(lines)
    for model in dict.fromkeys(line["model"] for line in lines):
        print(model, facts([line for line in lines if line["model"] == model]))


if __name__ == "__main__":
    main()
