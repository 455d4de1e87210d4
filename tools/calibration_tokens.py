"""Measures what conversions lose by how many tokens they were calibrated on.

python tools/calibration_tokens.py builtin work/ mla:0.25 lowrank:0.125      # goes on with what was converted
python tools/calibration_tokens.py --tokens 6144,24576 smollm2 work/ lowrank:0.25
python tools/calibration_tokens.py --draw docs/calibration-tokens.svg docs/calibration-tokens.csv

All are read on the same held-out windows, as `surgery eval` reads them. A line a conversion goes to <work>/<model>.csv;
with the picture comes the table of docs/calibration.md.
"""

from __future__ import annotations

import argparse
import csv
from itertools import product
from pathlib import Path
from typing import Any

import surgery

TOKENS = (6_144, 12_288, 24_576, 49_152)
WINDOWS = 16
ASKED: dict[str, dict[str, Any]] = {"smollm2": {"calibration": "prose=0.6,code=0.4", "held_out": 1}}
READ: dict[str, dict[str, Any]] = {"smollm2": {"data": ("prose",), "seed": 2}}
"""As recipes/smollm2.yaml has them; of another model the defaults."""
NAMES = ("model", "to", "kv_ratio", "tokens", "source", "increase", "low", "high")
"""``source``: its loss, nats a token; ``low`` and ``high``: a 95% interval of the
increase, over windows."""

Line = dict[str, Any]


def converted(model: str, form: str, tokens: int, work: Path) -> Path:
    """Where the conversion is; made if it is not there."""
    to, ratio = form.split(":")
    out = work / "made" / f"{to}-{ratio}-{tokens}"
    if not out.exists():
        asked = {"kv_ratio": float(ratio), "calibration_tokens": tokens, **ASKED.get(model, {})}
        surgery.convert(model, to=to, out=out, keep_statistics=str(work / f"statistics-{tokens}"), **asked)
    return out


def measured(model: str, made: dict[tuple[str, int], Path], work: Path) -> list[Line]:
    """A line for each."""
    report = surgery.evaluate(
        {path.name: path for path in made.values()},
        baseline=model,
        tasks=("loss",),
        variants=(),
        decoded=0,
        windows=WINDOWS,
        out=work / "report",
        overwrite=True,
        **READ.get(model, {}),
    ).report
    source, *rows = report["rows"]
    found = {row["name"]: row["comparison"]["loss"] for row in rows}
    lines = []
    for (form, tokens), path in made.items():
        increase = (found[path.name][name] for name in ("difference", "low", "high"))
        values = model, *form.split(":"), tokens, source["results"]["loss"]["loss"], *increase
        lines.append(dict(zip(NAMES, values, strict=True)))
    return lines


def curves(lines: list[Line]) -> dict[tuple[str, str], dict[int, tuple[float, float, float]]]:
    """Increase and its interval by tokens, of every model and conversion."""
    found: dict[tuple[str, str], dict[int, tuple[float, float, float]]] = {}
    for line in lines:
        curve = line["model"], f"{line['to']} {float(line['kv_ratio']):g}"
        increase, low, high = (float(line[name]) for name in ("increase", "low", "high"))
        found.setdefault(curve, {})[int(line["tokens"])] = increase, low, high
    return found


def table(lines: list[Line]) -> str:
    """Rows of Markdown: the increase at each number of tokens, with half of its interval."""
    rows = []
    for curve, points in curves(lines).items():
        cells = (f"{at[0]:+.4f} ± {(at[2] - at[1]) / 2:.4f}" if (at := points.get(n)) else "" for n in TOKENS)
        rows.append(f"| {' | '.join((*curve, *cells))} |")
    return "\n".join(rows)


def draw(lines: list[Line], path: Path) -> None:
    """Increase of the loss by tokens, these in logarithms; a panel a model."""
    import matplotlib
    from matplotlib.figure import Figure

    from surgery.eval.report.style import PALETTE, STYLE

    models = list(dict.fromkeys(line["model"] for line in lines))
    colours: dict[tuple[str, str], str] = {}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(models), 4.0), layout="constrained")
        panels = dict(zip(models, figure.subplots(1, len(models), squeeze=False)[0], strict=True))
        for (model, conversion), points in curves(lines).items():
            tokens = sorted(points)
            increase, low, high = zip(*(points[n] for n in tokens), strict=True)
            colour = colours.setdefault((model, conversion), PALETTE[len(colours)])
            panels[model].plot(tokens, increase, "o-", color=colour, label=conversion, markersize=4)
            panels[model].fill_between(tokens, low, high, color=colour, alpha=0.12, linewidth=0)
        for model, axes in panels.items():
            axes.set(xscale="log", ylim=(0, None), title=model, xlabel="calibration tokens")
            axes.margins(x=0.12)
            axes.set_xticks(TOKENS, [f"{n:,}" for n in TOKENS])
            axes.minorticks_off()
            axes.legend()
        panels[models[0]].set_ylabel("loss increase, nats per token")
        figure.savefig(path)


def read(path: Path) -> list[Line]:
    """The lines of a file."""
    return list(csv.DictReader(path.read_text().splitlines()))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="FILE")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), metavar="N,N")
    parser.add_argument("given", nargs="+", metavar="MODEL WORK FORM... | CSV")
    asked = parser.parse_args()
    if asked.draw:
        lines = read(Path(*asked.given))
        draw(lines, asked.draw)
        print(table(lines))
        return
    model, folder, *forms = asked.given
    work = Path(folder)
    wanted = product(forms, map(int, asked.tokens.split(",")))
    made = {each: converted(model, *each, work) for each in wanted}
    with (work / f"{model}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(measured(model, made, work))


if __name__ == "__main__":
    main()
