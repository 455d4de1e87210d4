"""Stores of tensor bytes: safetensors files.

A store has ``infos``, the infos of all tensors in the order of the files, and ``read``, which copies byte ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from surgery.checkpoint.disk import disk_errors, read_exactly
from surgery.checkpoint.safetensors_format import read_header
from surgery.checkpoint.tensors import CHUNK_BYTES, TensorInfo, as_bytes
from surgery.common.errors import SurgeryError

ByteRanges = Sequence[tuple[int, int]]


class Store(Protocol):
    """Tensor infos by name and access to the bytes; ``max_readers`` is the useful number of concurrent readers."""

    max_readers: int
    infos: dict[str, TensorInfo]

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        """Fill ``out`` (uint8) with consecutive byte ranges [start, stop) of a tensor."""
        ...


def read_rows(ranges: ByteRanges, columns: int, itemsize: int, rows: Callable[[int, int], Tensor], out: Tensor) -> None:
    """Implement :meth:`Store.read` with a function that returns rows [first, after), in float32 chunks of 16 MiB."""
    row_bytes, step = columns * itemsize, max(1, CHUNK_BYTES // (4 * columns))
    for start, stop in ranges:
        last = -(-stop // row_bytes)
        for first in range(start // row_bytes, last, step):
            after = min(first + step, last)
            begin, end = max(0, start - first * row_bytes), min(stop, after * row_bytes) - first * row_bytes
            chunk = as_bytes(rows(first, after))[begin:end]
            out[: len(chunk)] = chunk
            out = out[len(chunk) :]


class SafetensorsStore:
    """Store of safetensors files, read without memory maps, whose pages would stay resident up to the model's size."""

    max_readers = 4  # one thread hashes about as fast as a disk reads

    def __init__(self, folder: Path, files: Sequence[str]):
        self._folder = folder
        self._offsets: dict[str, int] = {}
        self.infos: dict[str, TensorInfo] = {}
        for file in files:
            for name, (info, offset) in read_header(folder, file).items():
                _add(self.infos, name, info, folder)
                self._offsets[name] = offset

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        path = self._folder / self.infos[name].file
        view = memoryview(out.numpy())
        with disk_errors(path), open(path, "rb", buffering=0) as file:
            for start, stop in ranges:
                file.seek(self._offsets[name] + start)
                if not read_exactly(file, view[: stop - start]):
                    raise SurgeryError.at(path, f"was truncated while it was read ({name}); start again")
                view = view[stop - start :]


def _add(infos: dict[str, TensorInfo], name: str, info: TensorInfo, folder: Path) -> None:
    if name in infos:
        raise SurgeryError.at(folder, f"{name} is in both {infos[name].file} and {info.file}; remove the stale file")
    infos[name] = info
