"""Test and time the kernels, and time decoding, on a machine with a GPU; write the results to the documentation.

    python tools/gpu.py run --out results      # on that machine, from a checkout; repeat for the remaining steps
    python tools/gpu.py merge results          # docs/gpu/*.json and the tables made from them

``run`` executes the steps of `gpu_steps.py` in order, each in a process with a time limit. Their rows are in the output
folder as soon as they are measured, so that an interrupted run keeps them. `run.json` there has the command, the commit
and how each step ended. A second ``run`` into the same folder continues with the steps that did not succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_report import RUN, merge
from gpu_steps import ROOT, STEPS, Setup, Step

from surgery.common.errors import SurgeryError
from surgery.kernels.bench.run import write_json

LEAST = 20.0
"""Minimum remaining seconds to start a step."""
SPARE = 12.0
"""Seconds between the limit that a step is told and the one at which it is interrupted."""


def run(seconds: float, out: Path, steps: str | None, device: str, tiny: bool) -> None:
    """Run the steps that have not succeeded, in order, within ``seconds``.

    ``steps`` are comma-separated names, None for all; ``tiny`` rehearses. Raises SurgeryError: an unknown step.
    """
    by_name = {step.name: step for step in STEPS}
    names = list(by_name) if steps is None else [name.strip() for name in steps.split(",")]
    if unknown := [name for name in names if name not in by_name]:
        raise SurgeryError(f"--steps {unknown[0]}: unknown; choose from {', '.join(by_name)}")
    out.mkdir(parents=True, exist_ok=True)
    setup = Setup(out.resolve(), device, tiny)
    record: dict[str, Any] = json.loads((out / RUN).read_text()) if (out / RUN).exists() else {}
    record = {"commands": [], "steps": {}, **record, "commit": commit(), "tiny": tiny}
    record["created"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record["commands"].append(" ".join(sys.argv))
    end = time.monotonic() + seconds
    for name in names:
        if record["steps"].get(name, {}).get("code") != 0:
            remaining = end - time.monotonic()
            late = {"why": "no time is left in this run"}
            record["steps"][name] = late if remaining < LEAST else run_step(by_name[name], setup, remaining)
            write_json(out / RUN, record)


def run_step(step: Step, setup: Setup, remaining: float) -> dict[str, Any]:
    """Run a step until it ends or reaches its limit; return exit code, seconds, and whether it was interrupted."""
    limit = min(remaining, step.seconds * (4 if setup.tiny else 1))
    print(f"{step.name}, at most {limit:.0f} s", flush=True)
    began = time.monotonic()
    (setup.out / step.rows).unlink(missing_ok=True)
    process = start(step.arguments(setup, max(1.0, limit - SPARE)), setup.out / "run.log")
    code = wait(process, limit)
    if cut := code is None:
        os.killpg(process.pid, signal.SIGINT)  # the step reports its results so far
        if (code := wait(process, SPARE)) is None:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    seconds = round(time.monotonic() - began, 1)
    print(f"{step.name}: exit code {code} after {seconds:.0f} s{' (time limit)' if cut else ''}", flush=True)
    return {"code": code, "seconds": seconds, "cut": cut}


def start(arguments: list[str], log: Path) -> subprocess.Popen:
    """Start Python in a session of its own, whose processes can be ended together, with its output in the log."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )


def wait(process: subprocess.Popen, seconds: float) -> int | None:
    """Return the exit code of a process; None if it still runs after ``seconds``."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def commit() -> str | None:
    """Return the commit of the checkout; None without git."""
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return None


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|merge")
    one = commands.add_parser("run", help="measure, on the machine with the GPU")
    one.add_argument("--seconds", type=float, default=900.0, help="time limit of this run; no step starts after it")
    one.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    one.add_argument("--steps", help=f"some of {', '.join(step.name for step in STEPS)}")
    one.add_argument("--device", default="cuda")
    one.add_argument("--tiny", action="store_true", help="a rehearsal: the same steps at tiny shapes, on any device")
    one = commands.add_parser("merge", help="make the dated report and the tables of the documentation")
    one.add_argument("results", type=Path, help="folder that run wrote")
    options = vars(parser.parse_args())
    try:
        {"run": run, "merge": merge}[options.pop("command")](**options)
    except SurgeryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
