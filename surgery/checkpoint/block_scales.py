"""Weights in fp8 with a scale for each block, as DeepSeek publishes them, read as bfloat16.

A matrix ``X.weight`` in e4m3 has beside it ``X.weight_scale_inv``, one float a block of 128 by 128 numbers (the last of
a row or column may be smaller), by which the block is multiplied.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.stores import ByteRanges, Store
from surgery.checkpoint.tensors import CHUNK_BYTES, as_bytes, describe
from surgery.common.errors import SurgeryError

SCALE = "_scale_inv"


def block_of(quantised: dict[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, from a config's ``quantization_config``; None where it is another method."""
    block = quantised.get("weight_block_size")
    if quantised.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        return None
    return (block[0], block[1]) if all(type(size) is int and size > 0 for size in block) else None


class BlockScaleStore:
    """A store whose fp8 matrices are dequantised as they are read, at most 16 MiB at a time; their scales are hidden.

    Args:
        store: what holds the matrices and their scales.
        block: rows and columns that share a scale.
    """

    DTYPE = torch.bfloat16

    def __init__(self, store: Store, block: tuple[int, int]):
        self._store, self._block, self.max_readers = store, block, store.max_readers
        self.infos = {}
        for name, info in store.infos.items():
            scale = store.infos.get(name + SCALE)
            if scale is not None:
                wanted = tuple(-(-size // of) for size, of in zip(info.shape, block, strict=False))
                if info.dtype != torch.float8_e4m3fn or len(info.shape) != 2 or scale.shape != wanted:
                    raise SurgeryError(
                        f"{name}: {describe(info)} does not fit its scales, {describe(scale)} by {block}"
                    )
                info = replace(info, dtype=self.DTYPE, nbytes=math.prod(info.shape) * self.DTYPE.itemsize)
            elif info.dtype.itemsize == 1 and info.dtype.is_floating_point:
                raise SurgeryError(f"{name}: {describe(info)} without scales ({name}{SCALE})")
            if not name.endswith(SCALE):
                self.infos[name] = info

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        """As :meth:`Store.read`."""
        if name + SCALE not in self._store.infos:
            return self._store.read(name, ranges, out)
        scales, columns = self._whole(name + SCALE).float(), self.infos[name].shape[1]
        row_bytes = columns * self.DTYPE.itemsize
        step = max(1, CHUNK_BYTES // (4 * columns))
        for start, stop in ranges:
            last = -(-stop // row_bytes)
            for first in range(start // row_bytes, last, step):
                after = min(first + step, last)
                rows = as_bytes(self._rows(name, scales, first, after))
                begin = max(0, start - first * row_bytes)
                wanted = rows[begin : min(stop, after * row_bytes) - first * row_bytes]
                out[: len(wanted)] = wanted
                out = out[len(wanted) :]
        return None

    def _rows(self, name: str, scales: Tensor, first: int, after: int) -> Tensor:
        """Rows [first, after) of a matrix, dequantised."""
        stored = self._store.infos[name]
        raw = torch.empty((after - first) * stored.shape[1], dtype=torch.uint8)
        self._store.read(name, [(first * stored.shape[1], after * stored.shape[1])], raw)
        values = raw.view(stored.dtype).view(-1, stored.shape[1]).float()
        of_row = torch.arange(first, after) // self._block[0]
        of_column = torch.arange(stored.shape[1]) // self._block[1]
        return (values * scales[of_row][:, of_column]).to(self.DTYPE)

    def _whole(self, name: str) -> Tensor:
        info = self._store.infos[name]
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        self._store.read(name, [(0, info.nbytes)], raw)
        return raw.view(info.dtype).view(info.shape)
