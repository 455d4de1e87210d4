"""Measures what conversions lose by how many tokens they were calibrated on.

python tools/calibration_tokens.py builtin work/ mla:0.25 lowrank:0.125      # goes on with what was converted
python tools/calibration_tokens.py --tokens 6144,24576 smollm2 work/ lowrank:0.25
python tools/calibration_tokens.py --table docs/calibration-tokens.csv              # that of docs/calibration.md

All are read on the same held-out windows, as `surgery eval` reads them. A line a conversion goes to <work>/<model>.csv.
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


def table(lines: list[Line]) -> str:
    """Rows of Markdown: the increase at each number of tokens, with half of its interval."""
    curves: dict[tuple[str, str], dict[int, str]] = {}
    for line in lines:
        curve = line["model"], f"{line['to']} {float(line['kv_ratio']):g}"
        increase, low, high = (float(line[name]) for name in ("increase", "low", "high"))
        curves.setdefault(curve, {})[int(line["tokens"])] = f"{increase:+.4f} ± {(high - low) / 2:.4f}"
    return "\n".join(
        f"| {' | '.join((*curve, *(cells.get(n, '') for n in TOKENS)))} |" for curve, cells in curves.items()
    )


def read(path: Path) -> list[Line]:
    """The lines of a file."""
    return list(csv.DictReader(path.read_text().splitlines()))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print that of a file")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), metavar="N,N")
    parser.add_argument("given", nargs="+", metavar="MODEL WORK FORM... | CSV")
    asked = parser.parse_args()
    if asked.table:
        print(table(read(Path(*asked.given))))
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
