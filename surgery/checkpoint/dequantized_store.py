"""Dequantization of a checkpoint's quantized matrices while reading."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from surgery.checkpoint.quantized import Scaled
from surgery.checkpoint.stores import ByteRanges, Store, read_rows
from surgery.checkpoint.tensors import TensorInfo


class DequantizedStore:
    """Store that lists each quantized matrix in place of its first part; dequantizes at most 16 MiB at a time."""

    def __init__(self, store: Store, matrices: Mapping[str, Scaled]):
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

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        """Read as :meth:`Store.read` does."""
        if name not in self._matrices:
            self._store.read(name, ranges, out)
            return
        matrix = self._matrices[name]

        def rows(first: int, after: int) -> Tensor:
            return matrix.rows(self._rows, first, after).to(matrix.dtype)

        read_rows(ranges, matrix.shape[1], matrix.dtype.itemsize, rows, out)

    def _rows(self, name: str, first: int, after: int) -> Tensor:
        info = self._store.infos[name]
        row_bytes = info.nbytes // max(info.shape[0], 1) if info.shape else info.nbytes
        raw = torch.empty((after - first) * row_bytes, dtype=torch.uint8)
        self._store.read(name, [(first * row_bytes, after * row_bytes)], raw)
        return raw.view(info.dtype).view(after - first, *info.shape[1:])
