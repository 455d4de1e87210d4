"""`python -m surgery.kernels.bench`: `surgery bench kernels` without the command line's own packages.

Needs torch alone (and matplotlib for the plot), so that it runs on a machine that has nothing else installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from surgery.kernels.bench.registry import OPERATIONS, cases
from surgery.kernels.bench.roofline_plot import draw_roofline
from surgery.kernels.bench.run import Bench
from surgery.kernels.bench.sizes import DEFAULTS, numbers


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a gate was red."""
    parser = argparse.ArgumentParser(prog="python -m surgery.kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("surgery-bench"), help="folder of kernels.json and roofline.png"
    )
    parser.add_argument("--shapes", default=",".join(DEFAULTS.models))
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--contexts", default=",".join(map(str, DEFAULTS.contexts)))
    parser.add_argument("--batches", default=",".join(map(str, DEFAULTS.batches)))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no case is begun")
    parser.add_argument("--no-baselines", action="store_true")
    given = parser.parse_args(arguments)
    wanted = cases(
        given.operations.split(","),
        given.shapes.split(","),
        numbers(given.contexts),
        numbers(given.batches),
        [getattr(torch, given.dtype)],
    )
    bench = Bench(
        torch.device(given.device),
        given.out / "kernels.json",
        tune=given.tune,
        tuned_folder=given.out / "tuned",
        seconds=given.limit,
        baselines=not given.no_baselines,
    )
    record = bench.run(wanted, " ".join(["python -m surgery.kernels.bench", *(arguments or sys.argv[1:])]))
    if bench.timed and any("seconds" in row for row in record["rows"]):
        draw_roofline(record, given.out / "roofline.png")
    if record["note"]:
        print(record["note"], file=sys.stderr)
    return int(any(not row["gate"]["passed"] for row in record["rows"] if "gate" in row))


if __name__ == "__main__":
    sys.exit(main())
