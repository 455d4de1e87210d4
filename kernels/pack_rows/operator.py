"""Operator `surgery::pack_rows`: quantize and pack the values of new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from surgery.kernels.mla_decode.operator import unsupported
from surgery.kernels.mla_decode.row_slots import grouped, row_bytes
from surgery.kernels.operation import Operation
from surgery.kernels.pack_rows.reference import packed_rows


def pack_rows(values: Tensor, step: Tensor, mean: Tensor, fields: Sequence[int]) -> Tensor:
    """Clamp, round and pack values [B, T, channels] of any dtype into uint8 rows [B, T, bytes].

    The bytes equal those of `TokenQuantizer.encode`: arithmetic in fp32, ties to even.

    Args:
        step, mean, fields: as in `mla_decode_packed`.

    Raises:
        ValueError: inconsistent shapes or dtypes.
    """
    return _pack_rows(values, step, mean, tuple(fields))


def _check(call: SimpleNamespace) -> None:
    if len(call.fields) % 4 or not call.fields:
        raise ValueError(f"pack_rows: fields must have 4 integers per field, not {len(call.fields)} in all")
    width = sum(count for _, count, _, _ in grouped(call.fields))
    if call.values.dim() != 3 or call.values.shape[-1] != width:
        raise ValueError(f"pack_rows: values must be [B, T, {width}], not {list(call.values.shape)}")
    for what, tensor in (("step", call.step), ("mean", call.mean)):
        if tensor.shape != (width,) or tensor.dtype != torch.float32:
            raise ValueError(f"pack_rows: {what} must be fp32 [{width}], not {tensor.dtype} {list(tensor.shape)}")


_pack_rows = Operation(
    "pack_rows",
    packed_rows,
    lambda call: call.values.new_empty(*call.values.shape[:2], row_bytes(call.fields), dtype=torch.uint8),
    unsupported,
    _check,
)
