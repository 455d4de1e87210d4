"""Tensors of a GGUF file under Hugging Face's names, dequantized while they are read."""

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
from surgery.checkpoint.read_ahead import Place
from surgery.checkpoint.stores import ByteRanges, read_rows
from surgery.checkpoint.tensors import TensorInfo
from surgery.common.errors import SurgeryError


@dataclass(frozen=True)
class Mapped:
    """A stored tensor and how its rows are to be read: ``order[i]`` is the stored row of row i, None for itself.
    ``offset`` is added to its numbers."""

    stored: GgufTensor
    order: Tensor | None = None
    offset: float = 0.0


class GgufStore:
    """Dequantizes as much as is asked for, at most 16 MiB (in float32) and two heads at a time, to one dtype.

    Args:
        path: the file.
        tensors: by their names in a Hugging Face checkpoint.
        dtype: of what is read, whatever the stored type.
    """

    max_readers = 1  # numpy's dequantization holds the interpreter's lock most of the time

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

    def places(self, name: str) -> list[Place]:
        """Return the byte ranges as :meth:`Store.places` does."""
        stored = self._tensors[name].stored
        return [Place(self._path, stored.offset, stored.nbytes)]

    def _rows(self, file: BinaryIO, mapped: Mapped, first: int, after: int) -> Tensor:
        """Rows [first, after) of a tensor, [after - first, columns], in the store's dtype."""
        from gguf import GGMLQuantizationType, dequantize

        stored, picked = mapped.stored, None
        if mapped.order is not None:
            # Rows move within their head only, so what lies between the first and the last of them is little more.
            picked = mapped.order[first:after]
            first, after = int(picked.min()), int(picked.max()) + 1
        raw = np.empty((after - first, stored.row_bytes), dtype=np.uint8)
        file.seek(stored.offset + first * stored.row_bytes)
        if not read_exactly(file, memoryview(raw).cast("B")):
            raise SurgeryError.at(self._path, "became shorter while it was read; start again")
        values = torch.from_numpy(dequantize(raw, GGMLQuantizationType[stored.type]))
        if picked is not None:
            values = values[picked - first]
        return (values + mapped.offset if mapped.offset else values).to(self._dtype)


def _check_type(path: Path, kind: str) -> None:
    """Refuses a type that the gguf package cannot dequantize, before anything is read."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    number = GGMLQuantizationType[kind]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), dtype=np.uint8), number)
    except NotImplementedError:
        raise SurgeryError.at(path, f"holds tensors of type {kind}, which the gguf package cannot dequantize") from None
