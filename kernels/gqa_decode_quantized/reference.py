"""Grouped-query decoding over quantised keys and values, in plain PyTorch: the codes as numbers, then attention.

The codes are KIVI's (Liu et al., arXiv 2402.02750): keys share a scale and a zero point by channel, over `group`
tokens, or by token; values by token, over nearly equal groups of channels. fp8 codes (e4m3) have a scale alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.gqa_decode.reference import all_rows, attention, visible

BITS = {"int8": 8, "int4": 4, "int2": 2, "fp8": 8}
"""Bits of a code, by format."""


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
    """Attention of the last T of each row's tokens over those held as codes; arguments as of `gqa_decode_quantized`.

    Returns:
        out [B, T, H, v] in the query's dtype and lse [B, T, H] in float32, of float64 queries in float64.
    """
    rows, tokens = query.shape[:2]
    wide = torch.promote_types(query.dtype, torch.float32)
    key_group = group if keys == "channel" else None
    key = dequantized(key_codes, key_scale, key_zero, format, key_group, wide)
    value = dequantized(value_codes, value_scale, value_zero, format, None, wide)
    capacity = key.shape[2]
    ends = all_rows(capacity + behind, rows, query.device) if lengths is None else lengths
    last = ends if coded is None else torch.minimum(ends, coded)
    held = torch.arange(capacity, device=query.device) < last[:, None]
    return attention(query, key, value, scale, visible(held, ends, starts, tokens, window))


def dequantized(
    codes: Tensor, scale: Tensor, zero: Tensor | None, format: str, group: int | None, dtype: torch.dtype
) -> Tensor:
    """Tokens [B, G, S, d] of codes [B, G, S·bits/8, d].

    Args:
        scale, zero: by channel [B, G, S/group, d], by token [B, G, S, groups of d].
        group: tokens that share a scale by channel; None by token.
        dtype: of the result.
    """
    numbers = unpack(codes, BITS[format])
    numbers = numbers.view(torch.float8_e4m3fn).to(dtype) if format == "fp8" else numbers.to(dtype)
    scale, zero = (
        None if factor is None else spread(factor.to(dtype), numbers.shape, group) for factor in (scale, zero)
    )
    return numbers * scale if zero is None else torch.addcmul(zero, numbers, scale)


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Bytes [..., n·bits/8, d] → codes [..., n, d]; the first token of a byte is in its lowest bits."""
    if bits == 8:
        return codes.contiguous()
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
    return ((codes.unsqueeze(-2) >> shifts) & (2**bits - 1)).flatten(-3, -2)


def spread(factor: Tensor, shape: torch.Size, group: int | None) -> Tensor:
    """A scale or zero point of each group → one for each number of tokens [B, G, S, d]."""
    if group is not None:
        return factor.repeat_interleave(group, dim=-2)
    size = group_size(shape[-1], factor.shape[-1])
    return factor.repeat_interleave(size, dim=-1)[..., : shape[-1]]


def group_size(width: int, groups: int) -> int:
    """Channels that share a scale by token; the last group has what is left."""
    return -(-width // groups)
