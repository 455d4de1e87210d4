"""Compares what `surgery plan` expects with what conversions lose, on other text.

python tools/planning_accuracy.py builtin work/     # predicts, converts and measures; goes on with what was converted
python tools/planning_accuracy.py --carried builtin work/       # minutes: writes nothing, measures as plans do
python tools/planning_accuracy.py --carried --unseen 8 smollm2 work/    # on fewer texts, of a model that takes hours
python tools/planning_accuracy.py --recipe recipes/smollm2.yaml work/   # its conversions, measured by its report
python tools/planning_accuracy.py --draw docs/planning-accuracy.svg work/*.csv

Every candidate of plans at a half to a sixteenth of the KV bytes, and structures in 8 and 4 bits for all latents, which
no plan weighs, are converted without a fit and read through their caches on held-out windows that no plan saw. A line a
conversion goes to <work>/<model>.csv. With the picture goes a table of what plans choose, and of what else fits.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

import surgery
from surgery.calibration.held_out import HeldOut
from surgery.calibration.texts import load_texts
from surgery.checkpoint.named_models import model_named
from surgery.common.progress import Progress
from surgery.planning.candidates import Candidates, Sized
from surgery.planning.measure import Carried, Scored, measure
from surgery.planning.plan import opened_work
from surgery.planning.rounds import Rounds, Scores
from surgery.planning.rows import Row, choose, rows_of
from surgery.planning.settings import PlanSettings
from surgery.planning.sizes import SHARES, around_best
from surgery.running.source import Source
from surgery.structures.registry import find_target
from surgery.structures.work import Work

LENGTH, WINDOWS, PROMPTS = 512, 16, 24
SEEN, UNSEEN = 8, 16
"""Texts of a plan, half of which are for those that the others cannot tell apart, and others to measure on, as long as
``--unseen`` says nothing else."""
TEXT = {"calibration_length": LENGTH, "context": str(LENGTH)}
PAIRS = (("lowrank", {"bits": 8, "sinks": 4}), ("lowrank", {"bits": 4, "sinks": 4}))
"""Structures with as many bits for everything: what plans have bits chosen for each latent in the place of."""
NAMES = ("model", "command", "weighed", "kv_ratio", "predicted", "low", "high", "divergence")
NAMES += ("measured", "measured_low", "measured_high", "recall", "carried", "chosen", "by_text", "diverged")
TEXTS = ("model", "command", "chosen", "by_text")
"""Columns that are no numbers. ``weighed``: 1 of what plans choose among; ``carried``: 1 of what was carried through
the model on other text, 0 of written conversions; ``chosen``: the shares at which a plan does; ``by_text``: the
measured increase on each text; ``diverged``: what ``divergence`` is there."""


class Measured:
    """Candidates by name and text, each carried through the model once, as plans at several shares ask for the same."""

    def __init__(self, made: Work):
        self._made, self._sources = made, {}
        self._scored: dict[tuple[str, bytes], Scored] = {}

    def __call__(self, candidates: Sequence[Sized], part: HeldOut) -> Carried:
        """As `surgery.planning.measure.measure`."""
        text = part.tokens.numpy().tobytes()
        if new := [each for each in candidates if (each.name, text) not in self._scored]:
            carried = measure(new, self._made, part)
            self._sources[text] = carried.source
            self._scored |= {(each.name, text): score for each, score in zip(new, carried.scored, strict=True)}
        return Carried(self._sources[text], [self._scored[each.name, text] for each in candidates])


def candidates_of(model: str, work: Path, *, carried: bool, unseen: int) -> list[tuple[Sized, dict[str, Any]]]:
    """What plans weigh at all shares, and the pairs, with what is expected of them.

    Args:
        carried: measure them too, as plans do, on other texts and prompts, and write nothing.
        unseen: how many texts that is.
    """
    settings = PlanSettings(**TEXT, held_out=SEEN + unseen * carried, keep_statistics=str(work / "statistics"))
    progress = Progress()
    opened = Source.open(model_named(model), settings)
    texts = load_texts(opened, settings, progress, planted=False, held_out_length=settings.text_length)
    of_plan, others = texts.held_out.split(SEEN)
    quarters = of_plan.split(SEEN // 2)[0].split(SEEN // 4)  # the rounds of a plan
    with opened_work(opened, settings, texts, progress) as made:
        candidates = Candidates(opened, made, settings)
        weighed = list(candidates.at(SHARES))
        pairs = [candidates.sized(find_target(to), asked, share) for to, asked in PAIRS for share in SHARES]
        sized = [*weighed, *{each.name: each for each in pairs if each}.values()]
        carry = Measured(made)
        first, second = (carry(sized, quarter) for quarter in quarters)
        chosen = {share: _chosen(candidates, carry, of_plan, share) for share in SHARES}
        other = carry(sized, others) if carried else None
    source, found = first.source.with_more(second.source), []
    for place, each in enumerate(sized):
        score = first.scored[place].with_more(second.scored[place])
        increase = score.beyond(source)
        expected = {"weighed": int(place < len(weighed)), "kv_ratio": each.kv_bytes / candidates.source_bytes}
        expected |= {"predicted": increase.mean, "low": increase.low, "high": increase.high}
        expected |= {"divergence": score.divergence}
        expected["chosen"] = " ".join(f"{share:g}" for share, name in chosen.items() if name == each.name)
        if other:
            expected |= beyond(other.scored[place].losses, other.source.losses)
            expected |= {"recall": other.scored[place].recall, "carried": 1}
            expected |= {"diverged": other.scored[place].divergence}
        found.append((each, expected))
    return found


def _chosen(candidates: Candidates, carry: Measured, held_out: HeldOut, share: float) -> str:
    """The name of what a plan chooses at a share."""

    def told(weighed: Sequence[Sized], scores: Scores) -> list[Row]:
        return rows_of(weighed, scores, candidates.source_bytes, "", lambda sized: None)

    rounds = Rounds(held_out, lambda some, part, _: carry(some, part), told, share)
    rounds.add(list(candidates.at([share])))
    rounds.add(around_best(rounds, candidates, share), twice=False)
    rounds.decide(None)
    return rounds.tried[choose(rounds.rows(), share, None)].name


def converted(model: str, sized: Sized, work: Path) -> Path:
    """Where its conversion is; made if it is not there."""
    out = work / "made" / sized.name.removeprefix("--to ").replace(" --", "_").replace(" ", "-")
    if not out.exists():
        asked = dict(sized.asked)
        text = {"calibration_length": LENGTH, "held_out": 2, "keep_statistics": str(work / "statistics")}
        surgery.convert(model, to=sized.target.name, out=out, **asked, **text)
    return out


def measured(model: str, made: dict[str, Path], work: Path) -> dict[str, dict[str, float]]:
    """Of every conversion nats per token over the source's, with a 95% interval by window, and recall."""
    report = surgery.evaluate(
        made,
        baseline=model,
        tasks=("loss", "recall"),
        variants=(),
        length=LENGTH,
        decoded=0,  # one pass reads quantised values as decoding does
        windows=WINDOWS,
        recall_prompts=PROMPTS,
        out=work / "report",
        overwrite=True,
    ).report
    source, *rows = report["rows"]
    found = {}
    for row in rows:
        own, other = (each["results"]["loss"]["per_sequence"] for each in (row, source))
        found[row["name"]] = {**beyond(own, other), "recall": row["results"]["recall"]["accuracy"], "carried": 0}
    return found


def beyond(losses: Sequence[float], source: Sequence[float]) -> dict[str, float]:
    """The increase of the loss, with a 95% interval by sequence."""
    differences = [own - other for own, other in zip(losses, source, strict=True)]
    mean = sum(differences) / len(differences)
    spread = 1.96 * math.sqrt(sum((d - mean) ** 2 for d in differences) / (len(differences) - 1) / len(differences))
    found = {"measured": mean, "measured_low": mean - spread, "measured_high": mean + spread}
    return {**found, "by_text": " ".join(f"{difference:.6f}" for difference in differences)}


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
    texts = load_texts(opened, settings, progress, planted=False, held_out_length=settings.text_length)
    named = {"source", "name", "to", "keep_statistics", "held_out", "calibration"}
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
        values = 1, rows[name]["kv"]["ratio"], increase.mean, increase.low, increase.high, score.divergence
        values += found["difference"], found["low"], found["high"], rows[name]["results"]["recall"]["accuracy"]
        values += 0, "", "", None
        lines.append(dict(zip(NAMES, (source["source"], f"surgery convert {each.name}", *values), strict=True)))
    return lines


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """A line a conversion."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        for line in lines:
            writer.writerow(
                {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in line.items()}
            )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="FILE")
    parser.add_argument("--recipe", type=Path, metavar="FILE")
    parser.add_argument("--carried", action="store_true")
    parser.add_argument("--unseen", type=int, default=UNSEEN, metavar="TEXTS")
    parser.add_argument("given", nargs="+", metavar="MODEL WORK | WORK | CSV")
    asked = parser.parse_args()
    if asked.draw:
        lines = [line for path in asked.given for line in read(Path(path))]
        draw(lines, asked.draw)
        print(table([line for line in lines if line["by_text"]]))
        return
    work = Path(asked.given[-1])
    work.mkdir(parents=True, exist_ok=True)
    if asked.recipe:
        write(work / f"{asked.recipe.stem}.csv", of_recipe(asked.recipe, work))
        return
    model = asked.given[0]
    found, name, results = candidates_of(model, work, carried=asked.carried, unseen=asked.unseen), Path(model).name, {}
    if not asked.carried:
        results = measured(model, {each.name: converted(model, each, work) for each, _ in found}, work)
    lines = [
        {"model": name, "command": f"surgery convert {name} {each.name}", **expected, **results.get(each.name, {})}
        for each, expected in found
    ]
    write(work / f"{name}.csv", lines)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, numbers as numbers."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [
        {name: value if name in TEXTS else float(value) if value else None for name, value in line.items()}
        for line in lines
    ]


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


def kind(line: dict[str, Any]) -> str:
    """Of a conversion: plain cache of codes, structure, structure with one number of bits, or mixture of bits."""
    if "--to quantized" in line["command"]:
        return "plain"
    if "--bits auto" in line["command"]:
        return "mixture"
    return "pair" if "--bits" in line["command"] else "structure"


HALVES = 200
"""Of the texts, at random, on which rivals are taken."""
KINDS = ("structure", "pair", "plain")
"""Of what a plan's choice is compared with."""


def choices(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At every budget what a plan chooses, and of what else fits all, what lost least of each kind, and what moved
    predictions least."""
    found = []
    for share in SHARES:
        fitting = [line for line in lines if line["kv_ratio"] <= share * (1 + 1e-9)]
        choice = next(line for line in fitting if f"{share:g}" in line["chosen"].split())
        others = {each: [line for line in fitting if kind(line) == each] for each in KINDS}
        best = {each: min(of, key=lambda line: line["measured"]) for each, of in others.items() if of}
        rivals = [line for of in others.values() for line in of]
        nearest = min(rivals, key=lambda line: line["diverged"])
        found.append({"share": share, "choice": choice, "rivals": rivals, "nearest": nearest, **best})
    return found


def lead(choice: dict[str, Any], rivals: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What a choice loses more than the best of its rivals, with a 95% interval by text.

    The choice is made on other text than it is measured on, so the best rival is too: taken on a half of the texts and
    compared on the others, in the mean of `HALVES` random halves. The best of many on the texts that it is compared on
    would owe part of its lead to them.
    """
    own, *others = ([float(part) for part in line["by_text"].split()] for line in (choice, *rivals))
    texts, rng = range(len(own)), random.Random(0)
    found: list[list[float]] = [[] for _ in texts]
    for _ in range(HALVES):
        seen = rng.sample(texts, len(texts) // 2)
        best = min(others, key=lambda losses: sum(losses[text] for text in seen))
        for text in set(texts) - set(seen):
            found[text].append(own[text] - best[text])
    return beyond([fmean(differences) for differences in found], [0.0] * len(texts))


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The choices as rows of Markdown."""

    def cell(line: dict[str, Any] | None) -> str:
        if line is None:
            return "none fits"
        name = line["command"].partition("--to ")[2]
        return f"`{name}` {line['measured']:+.4f}, {line['recall']:.2f}"

    rows = []
    for model in dict.fromkeys(line["model"] for line in lines):
        for found in choices([line for line in lines if line["model"] == model]):
            moved = " / ".join(f"{found[each]['diverged']:.6f}" for each in ("choice", "nearest"))
            ahead = lead(found["choice"], found["rivals"])
            half = (ahead["measured_high"] - ahead["measured_low"]) / 2
            cells = [cell(found.get(each)) for each in ("choice", *KINDS)]
            cells += [f"{ahead['measured']:+.4f} ± {half:.4f}", moved]
            rows.append(f"| {model} | {found['share']:g} | {' | '.join(cells)} |")
    return "\n".join(rows)


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
