"""``surgery bench kernels``: runs the benchmark of `kernels/bench` for a command-line request."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from surgery.bench.settings import KernelRequest
from surgery.common.errors import SurgeryError
from surgery.common.setting import DTYPE_NAMES
from surgery.kernels.bench.registry import OPERATIONS, cases
from surgery.kernels.bench.run import Bench
from surgery.kernels.bench.sizes import DEFAULTS, TINY, numbers
from surgery.running.source import checked_device

DTYPES = ("bfloat16", "float16", "float32")


def measure_kernels(request: KernelRequest, out: Path, command: str = "") -> tuple[dict, Path]:
    """Check and measure kernels; return the record and the path of its file.

    Raises SurgeryError: an unknown name, or an invalid size.
    """
    device = checked_device(request.device)
    timed = device.type == "cuda"
    plan = DEFAULTS if timed else TINY
    dtype = DTYPE_NAMES.get(request.dtype, request.dtype) or ("bfloat16" if timed else "float32")
    if dtype not in DTYPES:
        raise SurgeryError(f"--dtype {dtype}: unknown; choose from {', '.join(DTYPES)}")
    try:
        selection = cases(
            _words(request.operations, OPERATIONS),
            _words(request.shapes, plan.models),
            sizes(request.contexts, "--contexts") if request.contexts else plan.contexts,
            sizes(request.batches, "--batches") if request.batches else plan.batches,
            [getattr(torch, dtype)],
        )
    except ValueError as error:
        raise SurgeryError(str(error)) from None
    path = out / "kernels.json"
    bench = Bench(
        device,
        path,
        seconds=float("inf") if request.limit is None else request.limit,
        baselines=request.baselines,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return bench.run(selection, command), path


def sizes(text: str, option: str) -> list[int]:
    """Parse a list of sizes such as `8k,32768`. Raises SurgeryError: an item that is no positive integer."""
    try:
        return numbers(text)
    except ValueError as error:
        raise SurgeryError(f"{option}: {error}") from None


def _words(text: str | None, default) -> list[str]:
    return list(default) if text is None else [word.strip() for word in text.split(",") if word.strip()]
