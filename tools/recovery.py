"""What a SIGKILL costs each long verb: the same work whole, and killed once on its way and begun again.

    PYTHONPATH=. python tools/recovery.py FOLDER

Prints the table of docs/reliability.md. Every verb works on the demo model, for a minute or two; what is lost is the
time of both runs together less that of one that was not killed, so it holds the start of Python, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import psutil

from surgery.common.human import duration

KILLED_AT = (0.35, 0.65, 0.95)
"""Shares of the whole run's time."""
VERBS = {
    "convert": "convert builtin --to mla --kv-ratio 0.25 --out {out}/small",
    "heads": "heads score builtin --out {out}/heads.safetensors",
    "plan": "plan builtin --kv-ratio 0.25 --out {out}/plan.yaml",
    "heal": "heal {student} --teacher builtin --max-tokens 150000 --out {out}/healed",
    "eval": "eval builtin --tasks loss,recall,needle --out {out}/report",
}


def start(verb: str, **places: Path) -> subprocess.Popen:
    """The verb, silent."""
    command = [sys.executable, "-m", "surgery", *verb.format(**places).split()]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **silent)


def run(verb: str, **places: Path) -> float:
    """Seconds that it takes to its end."""
    began, process = time.monotonic(), start(verb, **places)
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{verb} failed:\n{errors[-2000:]}")
    return time.monotonic() - began


def killed_and_run(verb: str, after: float, **places: Path) -> float:
    """Seconds of a run that is killed and of the one that goes on from there."""
    process = start(verb, **places)
    try:
        _, errors = process.communicate(timeout=after)
        raise SystemExit(f"{verb} ended before it could be killed, with {process.returncode}:\n{errors[-2000:]}")
    except subprocess.TimeoutExpired:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.kill()
        process.communicate()
    return after + run(verb, **places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new; everything is written there")
    parser.add_argument("--verbs", nargs="+", choices=VERBS, default=list(VERBS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    student = args.folder / "student"
    run("convert builtin --to mla --kv-ratio 0.125 --fit-steps 0 --calibration-tokens 4096 --out {out}", out=student)
    print(f"| | whole | {' | '.join(f'killed at {share:.0%}' for share in KILLED_AT)} |\n|---|" + "---:|" * 4)
    for name in args.verbs:
        whole = run(VERBS[name], out=args.folder / name, student=student)
        lost = [
            killed_and_run(VERBS[name], share * whole, out=args.folder / f"{name}-{share}", student=student) - whole
            for share in KILLED_AT
        ]
        print(f"| `{name}` | {duration(whole)} | {' | '.join(f'{seconds:+.0f} s' for seconds in lost)} |", flush=True)


if __name__ == "__main__":
    main()
