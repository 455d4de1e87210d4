"""Out-of-memory handling in measurements, and a note for contexts beyond a model's position limit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Result = TypeVar("Result")


class OutOfMemory:
    """Result of `unless_out_of_memory` if an allocation failed."""


def unless_out_of_memory(function: Callable[[], Result]) -> Result | OutOfMemory:
    """Return `function()`, or `OutOfMemory()` if an allocation fails on an accelerator or the CPU.

    With memory overcommit, Linux may kill the process instead, which cannot be caught.
    """
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    free_memory()  # after the except block, which drops the traceback and the tensors in its frames
    return OutOfMemory()


def free_memory() -> None:
    """Collect garbage and empty the cache of the accelerator's allocator."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def beyond_trained_context(model: nn.Module, context: int) -> str | None:
    """Return a note if `context` exceeds the `max_position_embeddings` of the model's config, else None."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or context <= positions:
        return None
    return f"beyond the model's {positions} positions"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation on an accelerator or the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU allocator raises a RuntimeError with these messages on Linux, macOS and Windows.
    return any(words in str(error).lower() for words in ("can't allocate memory", "not enough memory", "out of memory"))
