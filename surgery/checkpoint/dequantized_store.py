"""Dequantization of a checkpoint's quantized matrices while reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from surgery.checkpoint.read_ahead import FileRange
from surgery.checkpoint.stores import ByteRanges, Store, read_rows
from surgery.checkpoint.tensors import TensorInfo, TensorSpec
from surgery.checkpoint.writer import CheckpointWriter

ReadRows = Callable[[str, int, int], Tensor]
"""Function that reads rows [first, after) of a stored 1D or 2D tensor."""


class Matrix(Protocol):
    """Stored form of a quantized matrix: names of its stored tensors, and its ``rows`` [first, after) in float32."""

    @property
    def parts(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, read: ReadRows, first: int, after: int) -> Tensor: ...


class DequantizedStore:
    """Store that lists each quantized matrix in place of its first part; dequantizes at most 16 MiB at a time."""

    def __init__(self, store: Store, matrices: Mapping[str, Matrix]):
        self._store, self._matrices, self.max_readers = store, matrices, store.max_readers
        names = {part: name for name, matrix in matrices.items() for part in matrix.parts}
        self.infos: dict[str, TensorInfo] = {}
        for stored, info in store.infos.items():
            name = names.get(stored)
            if name is None:
                self.infos[stored] = info
            elif name not in self.infos:
                matrix = matrices[name]
                nbytes = math.prod(matrix.shape) * matrix.dtype.itemsize
                self.infos[name] = TensorInfo(matrix.dtype, matrix.shape, nbytes, info.file)

    def parts(self, name: str) -> dict[str, TensorInfo]:
        """Return the stored parts of a quantized matrix; empty for any other tensor."""
        matrix = self._matrices.get(name)
        return {part: self._store.infos[part] for part in matrix.parts} if matrix else {}

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        """Read as :meth:`Store.read` does."""
        if name not in self._matrices:
            self._store.read(name, ranges, out)
            return
        matrix = self._matrices[name]

        def rows(first: int, after: int) -> Tensor:
            return matrix.rows(self._rows, first, after).to(matrix.dtype)

        read_rows(ranges, matrix.shape[1], matrix.dtype.itemsize, rows, out)

    def file_ranges(self, name: str) -> list[FileRange]:
        """Return the byte ranges as :meth:`Store.file_ranges` does."""
        parts = self._matrices[name].parts if name in self._matrices else (name,)
        return [file_range for part in parts for file_range in self._store.file_ranges(part)]

    def _rows(self, name: str, first: int, after: int) -> Tensor:
        info = self._store.infos[name]
        row_bytes = info.nbytes // max(info.shape[0], 1) if info.shape else info.nbytes
        raw = torch.empty((after - first) * row_bytes, dtype=torch.uint8)
        self._store.read(name, [(first * row_bytes, after * row_bytes)], raw)
        return raw.view(info.dtype).view(after - first, *info.shape[1:])


if TYPE_CHECKING:
    from surgery.checkpoint.reader import CheckpointReader


def dequantized_copy(reader: CheckpointReader) -> Path:
    """Return the folder of the copy, next to the reader's temporary folder; the first call writes it.

    Raises SurgeryError: the file cannot be read, or the disk is full.
    """
    out = reader.path.parent / "weights" / reader.path.name
    if out.exists():
        return out
    plan = {name: TensorSpec(reader.info(name).dtype, reader.info(name).shape) for name in reader.names()}
    with CheckpointWriter(out, plan) as writer:
        for name in plan:
            writer.copy(name, reader)
        writer.write_json("config.json", reader.config)
        for path in reader.sidecars():
            writer.copy_file(path, path.relative_to(reader.path))
        writer.commit()
    return out
