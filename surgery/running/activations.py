"""Memory for the activations of many tokens: RAM up to a limit, memory-mapped files beyond it.

A mapped tensor gives bitwise equal results, since the file holds its bytes in its dtype. The system can drop and reread
its pages; :func:`give_back` drops them immediately.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from surgery.checkpoint.disk import disk_errors

_MAPS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Memory maps of file-backed tensors by storage address."""


class ActivationMemory:
    """Allocator for activations that counts the bytes in RAM, under a limit, and in files.

    Spill files in ``folder`` are unnamed and vanish with their tensors or the process.
    """

    def __init__(self, limit: int | None, folder: Path):
        self._limit, self._folder = limit, folder
        self.used = self.spilled = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Allocate an uninitialized tensor, on ``device`` without a limit and on the host with a limit.

        Raises SurgeryError: the disk is full.
        """
        size = math.prod(shape) * dtype.itemsize
        if self._limit is None or not size:
            return torch.empty(shape, dtype=dtype, device=device)
        counter = "used" if self.used + size <= self._limit else "spilled"
        if counter == "used":
            buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            with disk_errors(self._folder), tempfile.TemporaryFile(dir=self._folder) as file:
                # Allocate the blocks: writing to a map on a full disk kills the process.
                os.posix_fallocate(file.fileno(), 0, size)
                buffer = mmap.mmap(file.fileno(), size)
        self._count(counter, size)
        weakref.finalize(buffer, self._count, counter, -size)
        tensor = torch.frombuffer(buffer, dtype=dtype).view(*shape)
        if counter == "spilled":
            _MAPS[tensor.untyped_storage().data_ptr()] = buffer
        return tensor

    def hold(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host within the limit; without a limit, a tensor on the host is returned unchanged."""
        return tensor.cpu() if self._limit is None else self.copy(tensor)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor within the limit, and drop the pages of the source."""
        target = self.empty(tensor.shape, tensor.dtype, tensor.device)
        for rows, source in zip(target, tensor, strict=True):
            rows.copy_(source)
            give_back(target, tensor)
        return target

    def _count(self, counter: str, size: int) -> None:
        setattr(self, counter, getattr(self, counter) + size)


def map_file(path: Path, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Map part of a file as a tensor for reading; writes do not reach the file and may be lost."""
    with open(path, "rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensor = torch.frombuffer(buffer, dtype=dtype, offset=offset, count=math.prod(shape)).view(*shape)
    _MAPS[tensor.untyped_storage().data_ptr()] = buffer
    return tensor


def in_file(tensor: Tensor) -> bool:
    """Return whether a tensor is file-backed."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _MAPS


def give_back(*tensors: Tensor) -> None:
    """Drop the pages of file-backed tensors, or of the tensors that they are views of, from RAM."""
    if sys.platform == "linux":
        for tensor in tensors:
            if in_file(tensor):
                _MAPS[tensor.untyped_storage().data_ptr()].madvise(mmap.MADV_DONTNEED)


def trim_allocator() -> None:
    """Return freed memory that glibc retains, mostly tensors below 32 MiB, to the system.

    An MoE layer and its gradients leave hundreds of MiB in gaps that the next layer does not fit in.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # other C libraries lack malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
