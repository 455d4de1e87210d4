"""GGUF tensors under Hugging Face names, dequantized while reading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from surgery.checkpoint.disk import disk_errors, read_exactly
from surgery.checkpoint.gguf_header import GgufTensor
from surgery.checkpoint.stores import ByteRanges, read_rows
from surgery.checkpoint.tensors import TensorInfo
from surgery.common.errors import SurgeryError


@dataclass(frozen=True)
class Mapped:
    """Stored tensor with its row order, where ``order[i]`` is the stored row of row i (None: unchanged), and the
    ``offset`` added to its elements."""

    stored: GgufTensor
    order: Tensor | None = None
    offset: float = 0.0


class GgufStore:
    """Store that dequantizes requested ranges to one dtype, in chunks of 16 MiB (in float32) and two heads."""

    max_readers = 1  # numpy's dequantization holds the GIL most of the time

    def __init__(self, path: Path, tensors: Mapping[str, Mapped], dtype: torch.dtype):
        self._path, self._tensors, self._dtype = path, tensors, dtype
        self.infos = {}
        for name, mapped in tensors.items():
            shape = mapped.stored.shape
            nbytes = math.prod(shape) * dtype.itemsize
            self.infos[name] = TensorInfo(dtype, shape, nbytes, path.name)
        for kind in {mapped.stored.type for mapped in tensors.values()}:
            _check_type(path, kind)

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        mapped, info = self._tensors[name], self.infos[name]
        with disk_errors(self._path), open(self._path, "rb", buffering=0) as file:
            rows = partial(self._rows, file, mapped)
            read_rows(ranges, mapped.stored.columns, info.dtype.itemsize, rows, out)

    def _rows(self, file: BinaryIO, mapped: Mapped, first: int, after: int) -> Tensor:
        """Read rows [first, after) of a tensor, [after - first, columns], in the store's dtype."""
        from gguf import GGMLQuantizationType, dequantize

        stored, picked = mapped.stored, None
        if mapped.order is not None:
            # Rows move only within a head, so reading the span between first and last row adds little.
            picked = mapped.order[first:after]
            first, after = int(picked.min()), int(picked.max()) + 1
        raw = np.empty((after - first, stored.row_bytes), dtype=np.uint8)
        file.seek(stored.offset + first * stored.row_bytes)
        if not read_exactly(file, memoryview(raw).cast("B")):
            raise SurgeryError.at(self._path, "was truncated while it was read; start again")
        values = torch.from_numpy(dequantize(raw, GGMLQuantizationType[stored.type]))
        if picked is not None:
            values = values[picked - first]
        return (values + mapped.offset if mapped.offset else values).to(self._dtype)


def _check_type(path: Path, kind: str) -> None:
    """Refuse a type that the gguf package cannot dequantize, before any tensor is read."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    number = GGMLQuantizationType[kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), dtype=np.uint8), number)
    except NotImplementedError:
        raise SurgeryError.at(
            path, f"contains tensors of type {kind}, which the gguf package cannot dequantize"
        ) from None
