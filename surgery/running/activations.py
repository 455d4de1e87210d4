"""Activations of many tokens, in memory up to a limit and past it in files that are mapped.

A mapped tensor computes as any other, to the same bits: what lies in the file are its own bytes, in its own dtype. Its
pages are the system's to drop and read again, and :func:`give_back` has it drop them at once.
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
"""Memory maps of the tensors that lie in a file, by the address of their storage."""


class ActivationMemory:
    """Gives out memory for activations and counts what is still in use.

    Args:
        limit: bytes that may be in memory at a time; None: any number.
        folder: of the files beyond, which have no name there and are gone with their tensors or the process.

    Attributes:
        used: bytes in memory that were given out under a limit and are in use.
        spilled: bytes in files that are in use.
    """

    def __init__(self, limit: int | None, folder: Path):
        self._limit, self._folder = limit, folder
        self.used = self.spilled = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Room for a tensor, on the device where there is no limit and on the host where there is one.

        Raises:
            SurgeryError: the disk is full.
        """
        size = math.prod(shape) * dtype.itemsize
        if self._limit is None or not size:
            return torch.empty(shape, dtype=dtype, device=device)
        place = "used" if self.used + size <= self._limit else "spilled"
        if place == "used":
            buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            with disk_errors(self._folder), tempfile.TemporaryFile(dir=self._folder) as file:
                # Without its blocks, writing to a map on a full disk would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                buffer = mmap.mmap(file.fileno(), size)
        self._count(place, size)
        weakref.finalize(buffer, self._count, place, -size)
        tensor = torch.frombuffer(buffer, dtype=dtype).view(*shape)
        if place == "spilled":
            _MAPS[tensor.untyped_storage().data_ptr()] = buffer
        return tensor

    def hold(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the host; itself where there is no limit and it is there already."""
        return tensor.cpu() if self._limit is None else self.copy(tensor)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy the tensor within the limit, and give back the pages of the source."""
        target = self.empty(tensor.shape, tensor.dtype, tensor.device)
        for rows, source in zip(target, tensor, strict=True):
            rows.copy_(source)
            give_back(target, tensor)
        return target

    def _count(self, place: str, size: int) -> None:
        setattr(self, place, getattr(self, place) + size)


def map_file(path: Path, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers of a file as a tensor, for reading: what is written to it stays out of the file and may be forgotten."""
    with open(path, "rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensor = torch.frombuffer(buffer, dtype=dtype, offset=offset, count=math.prod(shape)).view(*shape)
    _MAPS[tensor.untyped_storage().data_ptr()] = buffer
    return tensor


def in_file(tensor: Tensor) -> bool:
    """Return whether a tensor was past the limit."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _MAPS


def give_back(*tensors: Tensor) -> None:
    """Takes the pages of tensors that lie in files, or of which these are parts, out of this process's memory."""
    if sys.platform == "linux":
        for tensor in tensors:
            if in_file(tensor):
                _MAPS[tensor.untyped_storage().data_ptr()].madvise(mmap.MADV_DONTNEED)


def give_back_freed() -> None:
    """Takes what was freed out of this process's memory, where glibc keeps it: tensors of less than 32 MiB, mostly.

    A layer of experts and its gradients leave hundreds of MiB behind that the next one finds no room in.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # other libraries of C have no such function
            ctypes.CDLL(None).malloc_trim(0)
