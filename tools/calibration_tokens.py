"""Measures what conversions lose by how many tokens they were calibrated on, in closed form and fitted.

python tools/calibration_tokens.py builtin work/ mla:0.25 lowrank:0.125      # goes on with what was converted
python tools/calibration_tokens.py --closed --tokens 6144,24576 smollm2 work/ lowrank:0.25
python tools/calibration_tokens.py --draw docs/calibration-tokens.svg work/*-tokens.csv

All of them are read on the same held-out windows, as `surgery eval` reads them. A line a conversion goes to
<work>/<model>-tokens.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
from itertools import groupby, product
from pathlib import Path
from typing import Any

import surgery

TOKENS = (6144, 12288, 24576, 49152)
WINDOWS = 16
TEXT = {"smollm2": {"calibration": "prose=0.6,code=0.4"}}
"""As its report has it; else the default."""
FORMS = "closed form", "fitted"
NAMES = ("model", "to", "kv_ratio", "tokens", "fitted", "kept", "source", "increase", "low", "high")
"""``fitted``: 1 with the default fit, whose end ``kept`` of the layers have, 0 in closed form; ``low`` and ``high``: a
95% interval of the increase over windows."""


def converted(model: str, form: str, tokens: int, fitted: bool, work: Path) -> Path:
    """Where the conversion is; made if it is not there."""
    to, ratio = form.split(":")
    out = work / "made" / f"{to}-{ratio}-{tokens}-{'fitted' if fitted else 'closed'}"
    if not out.exists():
        asked = {"kv_ratio": float(ratio), "calibration_tokens": tokens, **TEXT.get(model, {})}
        asked |= {} if fitted else {"fit_steps": 0}
        surgery.convert(model, to=to, out=out, keep_statistics=str(work / f"statistics-{tokens}"), **asked)
    return out


def measured(model: str, made: dict[tuple[str, int, bool], Path], work: Path) -> list[dict[str, Any]]:
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
    ).report
    source, *rows = report["rows"]
    found = {row["name"]: row["comparison"]["loss"] for row in rows}
    lines = []
    for (form, tokens, fitted), path in made.items():
        fit = json.loads((path / "surgery_report.json").read_text())["target"].get("fit") or {"kept": []}
        values = (*form.split(":"), tokens, int(fitted), len(fit["kept"]), source["results"]["loss"]["loss"])
        values += tuple(found[path.name][name] for name in ("difference", "low", "high"))
        lines.append(dict(zip(NAMES, (Path(model).name, *values), strict=True)))
    return lines


def draw(lines: list[dict[str, str]], path: Path) -> None:
    """Increase of the loss by tokens, both in logarithms; a panel a model."""
    import matplotlib
    from matplotlib.figure import Figure

    from surgery.eval.report.style import PALETTE, STYLE

    models = {model: list(of) for model, of in groupby(lines, key=lambda line: line["model"])}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(models), 4.0), layout="constrained")
        panels = figure.subplots(1, len(models), squeeze=False)[0]
        for axes, (model, of) in zip(panels, models.items(), strict=True):
            forms = groupby(of, key=lambda line: (line["to"], line["kv_ratio"]))
            for colour, ((to, ratio), here) in zip(PALETTE, forms, strict=False):
                for fitted, points in groupby(sorted(here, key=by_fit), key=by_fit):
                    x, y, low, high = zip(*(numbers(line) for line in points), strict=True)
                    label = f"{to} {float(ratio):g}, {FORMS[int(fitted)]}"
                    axes.plot(x, y, "o-" if fitted == "1" else "o--", color=colour, label=label, markersize=4)
                    axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
            axes.set(xscale="log", yscale="log", title=model, xlabel="calibration tokens")
            axes.set_xticks(TOKENS, [f"{tokens // 1024}k" for tokens in TOKENS])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter("{x:g}")
            axes.legend()
        panels[0].set_ylabel("loss increase, nats per token")
        figure.savefig(path)


def table(lines: list[dict[str, str]]) -> str:
    """Rows of Markdown: of every form of a model the increase at each number of tokens, with half of its interval."""
    rows: dict[tuple[str, ...], dict[int, str]] = {}
    for line in lines:
        tokens, increase, low, high = numbers(line)
        form = line["model"], f"{line['to']} {float(line['kv_ratio']):g}", FORMS[int(line["fitted"])]
        rows.setdefault(form, {})[int(tokens)] = f"{increase:+.4f} ± {(high - low) / 2:.4f}"
    cells = ((*form, *(found.get(tokens, "") for tokens in TOKENS)) for form, found in rows.items())
    return "\n".join(f"| {' | '.join(each)} |" for each in cells)


def by_fit(line: dict[str, str]) -> str:
    """Lines of closed forms come before those of fits."""
    return line["fitted"]


def numbers(line: dict[str, str]) -> tuple[float, ...]:
    """Tokens, increase and its interval."""
    return tuple(float(line[name]) for name in ("tokens", "increase", "low", "high"))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, metavar="FILE")
    parser.add_argument("--closed", action="store_true", help="no fits")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), metavar="N,N")
    parser.add_argument("given", nargs="+", metavar="MODEL WORK FORM... | CSV...")
    asked = parser.parse_args()
    if asked.draw:
        lines = [line for path in asked.given for line in csv.DictReader(Path(path).read_text().splitlines())]
        draw(lines, asked.draw)
        print(table(lines))
        return
    model, work, *forms = asked.given
    tokens, fits = map(int, asked.tokens.split(",")), (False,) if asked.closed else (False, True)
    made = {each: converted(model, *each, Path(work)) for each in product(forms, tokens, fits)}
    with Path(work, f"{Path(model).name}-tokens.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(measured(model, made, Path(work)))


if __name__ == "__main__":
    main()
