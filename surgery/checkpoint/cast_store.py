"""Casting of a checkpoint's floating-point tensors to another dtype while reading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.stores import ByteRanges, Store
from surgery.checkpoint.tensors import CHUNK_BYTES, as_bytes
from surgery.common.errors import SurgeryError

CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that are cast; quantized weights, integers and fp8 keep their stored dtype."""


class CastStore:
    """Store whose floating-point tensors all have one dtype; casts at most 16 MiB at a time."""

    def __init__(self, store: Store, dtype: torch.dtype):
        self._store, self._dtype, self.max_readers = store, dtype, store.max_readers
        self.infos = {
            name: replace(info, dtype=dtype, nbytes=info.nbytes // info.dtype.itemsize * dtype.itemsize)
            if info.dtype in CASTABLE
            else info
            for name, info in store.infos.items()
        }

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        """Read as :meth:`Store.read` does; ranges hold whole elements."""
        stored = self._store.infos[name].dtype
        if stored == self.infos[name].dtype:
            self._store.read(name, ranges, out)
            return
        size, step = self._dtype.itemsize, CHUNK_BYTES // 8
        for start, stop in ranges:
            for first in range(start // size, stop // size, step):
                after = min(first + step, stop // size)
                raw = torch.empty((after - first) * stored.itemsize, dtype=torch.uint8)
                self._store.read(name, [(first * stored.itemsize, after * stored.itemsize)], raw)
                values = raw.view(stored)
                cast = values.to(self._dtype)
                if bool((cast.isinf() & ~values.isinf()).any()):
                    format_name = str(self._dtype).removeprefix("torch.")
                    raise SurgeryError(
                        f"{name} has values that {format_name} cannot hold: use --weights-dtype bfloat16 or float32"
                    )
                out[: cast.nbytes] = as_bytes(cast)
                out = out[cast.nbytes :]


def config_in(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Set the weight dtype of a config.json and of its nested model configs."""
    changed = {
        name: config_in(value, dtype) if isinstance(value, dict) and {"dtype", "torch_dtype"} & value.keys() else value
        for name, value in config.items()
        if name != "torch_dtype"
    }
    return {**changed, "dtype": str(dtype).removeprefix("torch.")}
