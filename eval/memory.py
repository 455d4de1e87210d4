"""What a model's generation takes at a context: bytes of its cache, and peak memory above its weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from surgery.eval.kv_cache import KVUse, measure_kv
from surgery.eval.peak_memory import PeakMemory

Result = TypeVar("Result")


class OutOfMemory:
    """What `unless_out_of_memory` gives instead of a result."""


def unless_out_of_memory(function: Callable[[], Result]) -> Result | OutOfMemory:
    """`function()`, or `OutOfMemory()` if an accelerator or the CPU refuses an allocation.

    A Linux system that promises more memory than it has may end the process instead; that cannot be caught.
    """
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    free_memory()  # only here is the traceback gone, and with it the tensors of its frames
    return OutOfMemory()


def free_memory() -> None:
    """Gives back what nothing refers to any more, on an accelerator too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_memory(model: nn.Module, context: int, batch: int, meter: PeakMemory) -> tuple[KVUse, dict[str, Any]]:
    """Fills a cache with `context` tokens and measures it on the way.

    Returns:
        What the cache held, and {"context", "cache_bytes", "peak_prefill_bytes", "peak_decode_bytes", "note"}: bytes of
        all sequences together, peaks None where they cannot be measured. The peak of decoding includes the cache.
    """
    meter.zero()
    prefill, decode = meter.phase(), meter.phase()
    use = measure_kv(model, context, batch, prefill, decode)
    return use, {
        "context": context,
        "cache_bytes": use.held_bytes,
        "peak_prefill_bytes": prefill.peak,
        "peak_decode_bytes": decode.peak,
        "note": beyond_trained_context(model, context),
    }


def beyond_trained_context(model: nn.Module, context: int) -> str | None:
    """A remark if `context` exceeds the positions that the model's config promises, else None."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or context <= positions:
        return None
    return f"beyond the model's {positions} positions"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an accelerator or the CPU refused an allocation."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU's allocator has no exception of its own; these are its words on Linux and macOS, and on Windows.
    return any(words in str(error).lower() for words in ("can't allocate memory", "not enough memory", "out of memory"))
