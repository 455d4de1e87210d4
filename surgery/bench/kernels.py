"""``surgery bench kernels``: a request of the command line, measured by `kernels/bench`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from surgery.common.errors import SurgeryError
from surgery.kernels.bench.registry import OPERATIONS, cases
from surgery.kernels.bench.roofline_plot import draw_roofline
from surgery.kernels.bench.run import Bench
from surgery.kernels.bench.sizes import DEFAULTS, QUICK, TINY, numbers
from surgery.running.source import checked_device

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class KernelRequest:
    """What was asked for; None where nothing was said. Lists are words with commas between them."""

    operations: str | None = None
    shapes: str | None = None
    contexts: str | None = None
    batches: str | None = None
    dtype: str | None = None
    quick: bool = False
    tune: bool = False
    tuned_folder: Path | None = None
    baselines: bool = True
    seconds: float | None = None
    device: str | None = None


def measure_kernels(request: KernelRequest, out: Path, command: str = "") -> tuple[dict, list[Path]]:
    """Checks and measures; returns the record and the files that were written.

    Raises:
        SurgeryError: a name or size that there is not, or tuning without a GPU.
    """
    device = checked_device(request.device or "auto")
    timed = device.type == "cuda"
    if request.tune and not timed:
        raise SurgeryError(f"--tune: configurations are chosen by speed, and the {device.type} device has none to give")
    plan = (QUICK if request.quick else DEFAULTS) if timed else TINY
    dtype = request.dtype or ("bfloat16" if timed else "float32")
    if dtype not in DTYPES:
        raise SurgeryError(f"--dtype {dtype}: choose {', '.join(DTYPES)}")
    try:
        wanted = cases(
            _words(request.operations, OPERATIONS),
            _words(request.shapes, plan.models),
            sizes(request.contexts, "--contexts") if request.contexts else plan.contexts,
            sizes(request.batches, "--batches") if request.batches else plan.batches,
            [getattr(torch, dtype)],
        )
    except ValueError as error:
        raise SurgeryError(str(error)) from None
    path, plot = out / "kernels.json", out / "roofline.png"
    bench = Bench(
        device,
        path,
        tune=request.tune,
        tuned_folder=request.tuned_folder,
        seconds=float("inf") if request.seconds is None else request.seconds,
        baselines=request.baselines,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    record = bench.run(wanted, command)
    written = [path]
    if any("seconds" in row for row in record["rows"]):
        draw_roofline(record, plot)
        written.append(plot)
    return record, written


def sizes(text: str, option: str) -> list[int]:
    """`8k,32768` as numbers.

    Raises:
        SurgeryError: a word that is none.
    """
    try:
        return numbers(text)
    except ValueError as error:
        raise SurgeryError(f"{option}: {error}") from None


def _words(text: str | None, default) -> list[str]:
    return list(default) if text is None else [word.strip() for word in text.split(",") if word.strip()]
