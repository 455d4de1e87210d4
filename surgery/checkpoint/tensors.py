"""Dtypes, shapes and bytes of stored tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Chunk size in bytes for streaming a tensor.
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
# Older torch versions lack some fp8 and unsigned dtypes.
DTYPE_OF_NAME = {
    name: getattr(torch, attribute) for name, attribute in _DTYPE_NAMES.items() if hasattr(torch, attribute)
}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_NAME.items()}


class Described(Protocol):
    """Object with a dtype and a shape: a `TensorSpec`, a `TensorInfo`, a tensor on the meta device."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a planned tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorInfo:
    """Dtype, shape and size of a stored tensor, and its ``file`` relative to the checkpoint's folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: str


def describe(tensor: Described) -> str:
    """Format dtype and shape: ``bfloat16 [4096, 1024]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat uint8 view of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def all_finite(tensor: Tensor) -> bool:
    """Return whether a contiguous tensor has no NaN or infinity; True for integer and bool tensors."""
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return True
    flat = tensor.reshape(-1)
    # Most fp8 dtypes lack reductions; upcast in chunks to save memory.
    pieces = (piece.float() for piece in flat.split(_PIECE)) if tensor.dtype.itemsize == 1 else (flat,)
    # aminmax propagates NaN and infinity, and avoids the input-sized temporaries of isfinite.
    return all(bool(torch.isfinite(torch.stack(piece.aminmax())).all()) for piece in pieces)
