"""Dispatch between Triton kernels and PyTorch references, with one warning when a reference runs."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Floating-point dtypes that kernels support; others, such as float64, run on the reference."""

logger = logging.getLogger("surgery.kernels")


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; not every build of PyTorch comes with it."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Return whether TRITON_INTERPRET=1 is set; kernels imported under it run in Triton's CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refusal(*tensors: Tensor | None) -> str | None:
    """Return the reason why no Triton kernel can run on these tensors, or None; None arguments are skipped."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not has_triton():
        return "triton is not installed"
    devices = {tensor.device for tensor in present}
    if len(devices) > 1:
        return f"tensors are on several devices: {', '.join(sorted(map(str, devices)))}"
    if not interpreted() and devices != {torch.device("cpu")} and torch.version.hip is not None:
        return "kernels require an NVIDIA GPU"
    if not interpreted() and next(iter(devices)).type != "cuda":
        return f"tensors are on the {next(iter(devices)).type} device"
    # Triton's interpreter multiplies bf16 wrongly.
    unsupported = {str(t.dtype) for t in present if t.is_floating_point() and t.dtype.itemsize > 1} - {
        str(dtype) for dtype in DTYPES if not (interpreted() and dtype == torch.bfloat16)
    }
    if unsupported:
        return f"no kernel for {', '.join(sorted(unsupported))}"
    return None


_warned: set[tuple[str, str]] = set()


def tell_once(operation: str, reason: str) -> None:
    """Warn once for each operation and reason that the operation falls back to its PyTorch reference."""
    if (operation, reason) not in _warned:
        _warned.add((operation, reason))
        logger.warning("%s runs in plain PyTorch: %s", operation, reason)
