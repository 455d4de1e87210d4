"""Memory that runs out while something is measured, and contexts that a model was not made for."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Result = TypeVar("Result")


class OutOfMemory:
    """Result of `unless_out_of_memory` where memory ran out."""


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


def beyond_trained_context(model: nn.Module, context: int) -> str | None:
    """A remark if `context` exceeds the positions that the model's config promises, else None."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or context <= positions:
        return None
    return f"beyond the model's {positions} positions"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an accelerator or the CPU refused an allocation."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU's allocator has no exception of its own; these are its words on Linux and macOS, and on Windows.
    return any(words in str(error).lower() for words in ("can't allocate memory", "not enough memory", "out of memory"))
