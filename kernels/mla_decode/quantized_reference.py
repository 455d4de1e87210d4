"""Latent attention over quantized tokens in plain PyTorch: what `quantized_kernel` must reproduce."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.gqa_decode.reference import all_rows, visible
from surgery.kernels.mla_decode.reference import shared_attention
from surgery.kernels.quantization import BITS, dequantized


def quantized_latent_attention(
    query: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rope_codes: Tensor,
    rope_scales: Tensor,
    rope_zeros: Tensor | None,
    scale: float,
    format: str,
    group: int,
    by_channel: bool,
    lengths: Tensor | None = None,
    coded: Tensor | None = None,
    starts: Tensor | None = None,
    key_gain: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla_decode_quantized` (see `quantized_operator.py`, whose arguments these are) in fp32, of float64 in float64.

    Returns:
        out [B, T, H, r] in the query's dtype, and lse [B, T, H], fp32 or float64.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    latent = dequantized(codes, scales, zeros, BITS[format], group if by_channel else None, wide)
    rope_key = dequantized(rope_codes, rope_scales, rope_zeros, BITS[format], None, wide)
    rows, capacity = latent.shape[:2]
    count = all_rows(capacity, rows, query.device) if coded is None else coded.clamp(max=capacity)
    filled = torch.arange(capacity, device=query.device) < count[:, None]
    mask = visible(filled, count if lengths is None else lengths, starts, query.shape[1], window)
    return shared_attention(query, latent, rope_key, scale, mask, key_gain)
