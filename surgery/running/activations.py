"""Layer inputs that are mapped from files, and memory that is returned to the system."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

_MAPS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Memory maps of file-backed tensors by storage address."""


def map_file(path: Path, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Map part of a file as a tensor for reading; writes do not reach the file and may be lost."""
    with open(path, "rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensor = torch.frombuffer(buffer, dtype=dtype, offset=offset, count=math.prod(shape)).view(*shape)
    _MAPS[tensor.untyped_storage().data_ptr()] = buffer
    return tensor


def give_back(*tensors: Tensor) -> None:
    """Drop the pages of file-backed tensors, or of the tensors that they are views of, from RAM."""
    if sys.platform == "linux":
        for tensor in tensors:
            if (buffer := _MAPS.get(tensor.untyped_storage().data_ptr())) is not None:
                buffer.madvise(mmap.MADV_DONTNEED)


def trim_allocator() -> None:
    """Return freed memory that glibc retains, mostly tensors below 32 MiB, to the system.

    An MoE layer and its gradients leave hundreds of MiB in gaps that the next layer does not fit in.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # other C libraries lack malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
