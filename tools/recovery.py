"""What a SIGKILL costs each long verb: the same work whole, and killed once on its way and begun again.

    PYTHONPATH=. python tools/recovery.py FOLDER

Prints a table, from which docs/reliability.md speaks. Every verb works on the demo model, for about a minute. It is
killed once it has had a share of the processor's time that the whole run takes, so that other work on the machine makes
no difference; what is lost is the time of both runs together less that of the whole one, the start of Python included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from surgery.common.human import duration

KILLED_AT = (0.5, 0.9)
"""Shares of the processor's time that the whole run takes."""
RECIPE = """
steps:
  - convert: {name: small, source: builtin, to: lowrank, kv_ratio: 0.25, calibration_tokens: 4096}
  - eval: {name: report, baseline: builtin, checkpoints: [small], tasks: [loss], limit: 24}
"""
STUDENT = "convert builtin --to mla --kv-ratio 0.125 --calibration-tokens 4096 --out {out}/small"
VERBS = {
    "convert": "convert builtin --to mla --kv-ratio 0.25 --calibration-tokens 4096 --out {out}/small",
    "heads": "heads score builtin --steps 40 --out {out}/heads.safetensors",
    "plan": "plan builtin --kv-ratio 0.25 --calibration-tokens 4096 --out {out}/plan.yaml",
    "heal": "heal {student} --teacher builtin --max-tokens 30000 --out {out}/healed",
    "eval": "eval builtin --tasks loss,recall --out {out}/report",
    "run": "run {recipe} --work {out}/work",
}


def start(verb: str, **places: Path) -> subprocess.Popen:
    """The verb, silent."""
    places["out"].mkdir(exist_ok=True)
    command = [sys.executable, "-m", "surgery", *verb.format(**places).split()]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **silent)


def run(verb: str, **places: Path) -> float:
    """Seconds of the processor that it takes to its end, those of processes that it started too."""
    process, before = start(verb, **places), used()
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{verb} failed:\n{errors[-2000:]}")
    return used() - before


def killed_and_run(verb: str, after: float, **places: Path) -> float:
    """The same of a run that is killed after so many seconds and of the one that goes on from there."""
    process, spent = start(verb, **places), 0.0
    while spent < after:
        time.sleep(0.05)
        if process.poll() is not None:
            raise SystemExit(f"{verb} ended before it could be killed:\n{process.stderr.read()[-2000:]}")
        with suppress(psutil.NoSuchProcess):  # one that it started has just ended
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            spent = sum(sum(each.cpu_times()[:4]) for each in family)  # that of its children that have ended too
    for each in reversed(family):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.communicate()
    return spent + run(verb, **places)


def used() -> float:
    """Seconds of the processor that processes which have ended took of those that this one started."""
    return sum(os.times()[2:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new; everything is written there")
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    if "heal" in args.verbs:
        run(STUDENT, out=args.folder / "student")
    recipe = args.folder / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    places = {"student": args.folder / "student" / "small", "recipe": recipe}
    columns = ["whole", *(f"killed at {share:.0%}" for share in KILLED_AT)]
    print(f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}", flush=True)
    for name in args.verbs:
        whole = run(VERBS[name], out=args.folder / name, **places)
        lost = [
            killed_and_run(VERBS[name], share * whole, out=args.folder / f"{name}-{share}", **places) - whole
            for share in KILLED_AT
        ]
        print(f"| `{name}` | {duration(whole)} | {' | '.join(f'{seconds:+.0f} s' for seconds in lost)} |", flush=True)


if __name__ == "__main__":
    main()
