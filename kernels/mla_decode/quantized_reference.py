"""Latent attention over quantised tokens in plain PyTorch: what `quantized_kernel` must reproduce.

The codes are those of KIVI (Liu et al., arXiv 2402.02750): integers of 8, 4 or 2 bits with a scale and a zero point a
group, or fp8 (e4m3) with a scale. Consecutive tokens share a byte, the first in its lowest bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.mla_decode.reference import attend, latent_logits, visible_tokens

BITS = {"int8": 8, "int4": 4, "int2": 2, "fp8": 8}
"""Bits of a code, by format."""


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
    latent = dequantized(codes, scales, zeros, format, group, by_channel, wide)
    rope_key = dequantized(rope_codes, rope_scales, rope_zeros, format, group, False, wide)
    batch, total = latent.shape[:2]
    held = torch.full((batch,), total, device=query.device) if coded is None else coded.clamp(max=total)
    visible = visible_tokens(query.shape[1], total, held if lengths is None else lengths, starts, window)
    visible = visible & (torch.arange(total, device=query.device) < held[:, None, None])
    hidden = ~visible.any(dim=1)[..., None]
    latent, rope_key = latent.masked_fill(hidden, 0), rope_key.masked_fill(hidden, 0)
    key_gain = None if key_gain is None else key_gain.to(wide).masked_fill(hidden, 0)
    return attend(latent_logits(query.to(wide), latent, rope_key, scale, key_gain), visible, latent, query.dtype)


def dequantized(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    format: str,
    group: int,
    by_channel: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Tokens [B, S, n] in `dtype` of codes [B, S · bits / 8, n], not rounded to another dtype on the way.

    scales, zeros: by channel [B, S / group, n], by token [B, S, groups of n].
    """
    if format == "fp8":
        numbers = codes.contiguous().view(torch.float8_e4m3fn).to(dtype)
    else:
        shifts = torch.arange(0, 8, BITS[format], dtype=torch.uint8, device=codes.device)[:, None]
        numbers = ((codes.unsqueeze(-2) >> shifts) & (2 ** BITS[format] - 1)).flatten(-3, -2).to(dtype)
    numbers = numbers * spread(scales, numbers.shape, group, by_channel).to(dtype)
    return numbers if zeros is None else numbers + spread(zeros, numbers.shape, group, by_channel).to(dtype)


def spread(scales: Tensor, shape: torch.Size, group: int, by_channel: bool) -> Tensor:
    """The scale of each number of tokens of `shape` [B, S, n]."""
    if by_channel:
        return scales.repeat_interleave(group, dim=1)
    if not shape[-1]:
        return scales.new_empty(shape)
    return scales.repeat_interleave(group_size(shape[-1], group), dim=-1)[..., : shape[-1]]


def group_size(width: int, group: int) -> int:
    """Channels of a token that share a scale, of at most `group`: the fewest groups, nearly equal."""
    return -(-width // max(1, -(-width // group)))
