"""Stored tensors: dtype, shape and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Bytes of a tensor that are handled at a time wherever it need not be whole.
CHUNK_BYTES = 16 * 2**20
_PIECE = 2**20

_DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
# Older releases of torch lack the rarer ones.
DTYPE_OF_NAME = {
    name: getattr(torch, attribute) for name, attribute in _DTYPE_NAMES.items() if hasattr(torch, attribute)
}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}


class Described(Protocol):
    """Anything with a dtype and a shape: a `TensorSpec`, a `TensorInfo`, a tensor on the meta device."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is going to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that is stored: ``nbytes`` bytes in ``file``, a file name relative to the checkpoint's folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: str


def describe(tensor: Described) -> str:
    """Dtype and shape for a message: ``bfloat16 [4096, 1024]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8)


def all_finite(tensor: Tensor) -> bool:
    """Return whether a contiguous tensor holds neither NaN nor infinity; true for every integer and bool tensor."""
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return True
    flat = tensor.reshape(-1)
    # Most fp8 kinds have no reductions of their own; widened a piece at a time, they take little memory.
    pieces = (piece.float() for piece in flat.split(_PIECE)) if tensor.dtype.itemsize == 1 else (flat,)
    # Extremes pass NaN and infinity on. Far faster than isfinite, which makes temporaries as large as its input.
    return all(bool(torch.isfinite(torch.stack(piece.aminmax())).all()) for piece in pieces)
