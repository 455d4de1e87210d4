"""``surgery bench all``: everything that a GPU is needed for, in one command with a limit of time.

The parts run one after the other, each in its own process, with what is left of the time or its share, whichever is
less. A process is ended when its time is over; what it wrote until then stays. The most telling part comes first.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.ownership import MARK, check_file

TESTS = Path(__file__).resolve().parents[2] / "tests" / "kernels"
GRACE = 15.0
"""Seconds between the limit that a part is told and the one at which it is ended."""


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: also of its log.
        share: of all the time, the most it takes.
        command: given the seconds that it may take.
        missing: why it cannot run here; None if it can.
    """

    name: str
    share: float
    command: Callable[[float], list[str]]
    missing: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def parts(out: Path, *, overwrite: bool = False) -> list[Part]:
    """What is run, in order; ``overwrite`` lets the parts replace earlier records."""
    again = ["--overwrite"] if overwrite else []
    surgery = [sys.executable, "-m", "surgery", "bench"]
    kernels = [sys.executable, "-m", "surgery.kernels.bench"]
    sanitizer = shutil.which("compute-sanitizer")
    small = ["--shapes", "tiny", "--contexts", "63,100", "--batches", "3", "--dtype", "bfloat16", "--no-baselines"]
    tuned = ["--tune", "--tuned", str(out / "tuned"), "--no-baselines", "--contexts", "128k", "--batches", "8"]

    def kernels_part(folder: str, *options: str) -> Callable[[float], list[str]]:
        command = [*surgery, "kernels", "--quick", *options, *again, "--out", str(out / folder)]
        return lambda seconds: [*command, "--limit", f"{seconds:.0f}"]

    return [
        Part(
            "tests",
            0.2,
            lambda seconds: [
                *(sys.executable, "-m", "pytest", "-q", "-n", "8", "-m", "gpu", str(TESTS)),
                *("-p", "no:cacheprovider"),
            ],
            None if TESTS.is_dir() else "the package was installed without its tests",
        ),
        Part("kernels", 0.35, kernels_part("kernels")),
        Part("tuning", 0.2, kernels_part("tuning", *tuned)),
        Part(
            "decode",
            0.3,
            lambda seconds: [
                *(*surgery, "decode", "llama3-8b", "llama2-7b", "--contexts", "8k,128k", "--batches", "1,max"),
                *("--limit", f"{seconds:.0f}", *again, "--out", str(out / "decode")),
            ],
            environment={"SURGERY_TUNED": str(out / "tuned")},
        ),
        Part(
            "memcheck",
            0.1,
            lambda seconds: [
                *(sanitizer or "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"),
                *(*kernels, *small, "--limit", f"{seconds:.0f}", "--out", str(out / "memcheck")),
            ],
            None if sanitizer else "compute-sanitizer is not installed",
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # else blocks of PyTorch's pool hide what lies behind a tensor
        ),
    ]


def chosen_parts(out: Path, names: str | None, *, overwrite: bool = False) -> list[Part]:
    """Some parts by name, with commas between; all without names.

    Raises:
        SurgeryError: one that there is not, or whose files are there and may not be replaced.
    """
    known = {part.name: part for part in parts(out, overwrite=overwrite)}
    wanted = list(known) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise SurgeryError(f"--parts {name}: choose {', '.join(known)}")
    for file in ("parts.json", *(f"{name}.log" for name in wanted)):
        check_file(out / file, overwrite=overwrite)
    return [known[name] for name in wanted]


def run_all(out: Path, seconds: float, say: Callable[[str], Any], waiting: list[Part]) -> dict:
    """Runs the parts; `out/parts.json` says how each ended, after each.

    Returns:
        {"out", "seconds", "parts": [{"name", "command", "seconds", "ended", "log"}]}.
    """
    out.mkdir(parents=True, exist_ok=True)
    began, record = time.monotonic(), {"origin": MARK, "out": str(out), "seconds": seconds, "parts": []}
    for number, part in enumerate(waiting):
        left = seconds - (time.monotonic() - began)
        # What earlier parts did not need is shared out among the rest.
        limit = left * part.share / sum(other.share for other in waiting[number:])
        record["parts"].append(_run(part, limit, out, say))
        (out / "parts.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def _run(part: Part, limit: float, out: Path, say: Callable[[str], Any]) -> dict:
    if part.missing:
        say(f"{part.name}: left out, {part.missing}")
        return {"name": part.name, "command": None, "seconds": 0.0, "ended": f"left out: {part.missing}", "log": None}
    command, log = part.command(max(1.0, limit - GRACE)), out / f"{part.name}.log"
    say(f"{part.name}, at most {limit:.0f} s: {' '.join(command)}")
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        file.write(f"# {MARK}\n")
        file.flush()
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **part.environment}
        )
        try:
            code = process.wait(timeout=max(1.0, limit))
            ended = "well" if code == 0 else f"with exit code {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = "stopped: its time was over"
    took = time.monotonic() - start
    say(f"{part.name}: ended {ended} after {took:.0f} s")
    return {"name": part.name, "command": " ".join(command), "seconds": took, "ended": ended, "log": log.name}


def need_gpu() -> None:
    """Raises SurgeryError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise SurgeryError("bench all measures a GPU and there is none; surgery bench kernels checks results without")
