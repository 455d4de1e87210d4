"""Grouped-query decoding over quantized keys and values, in plain PyTorch: dequantized, then attention."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.gqa_decode.reference import all_rows, attention, visible
from surgery.kernels.quantization import BITS, dequantized


def quantized_attention(
    query: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor | None,
    scale: float,
    format: str,
    group: int,
    keys: str = "channel",
    lengths: Tensor | None = None,
    coded: Tensor | None = None,
    starts: Tensor | None = None,
    window: int | None = None,
    behind: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of the last T of each row's tokens over the quantized ones; arguments as of `gqa_decode_quantized`.

    Returns:
        out [B, T, H, v] in the query's dtype and lse [B, T, H] in float32, of float64 queries in float64.
    """
    rows, tokens = query.shape[:2]
    wide = torch.promote_types(query.dtype, torch.float32)
    key_group = group if keys == "channel" else None
    key = dequantized(key_codes, key_scale, key_zero, BITS[format], key_group, wide)
    value = dequantized(value_codes, value_scale, value_zero, BITS[format], None, wide)
    capacity = key.shape[2]
    ends = all_rows(capacity + behind, rows, query.device) if lengths is None else lengths
    last = ends if coded is None else torch.minimum(ends, coded)
    filled = torch.arange(capacity, device=query.device) < last[:, None]
    return attention(query, key, value, scale, visible(filled, ends, starts, tokens, window))
