"""Group quantization to 8, 4, 3 or 2 bits, and packing of the codes into bytes.

Integer formats are asymmetric, with a scale and a zero point per group. fp8 (e4m3) has a scale only, which maps the
largest magnitude of the group to the largest of the format.

If the squared error matters, as for latents, 2-bit codes spaced between the extremes of a group are a poor choice. With
`clip` the range of a group is narrowed to the one of five candidates with the least squared error.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, "fp8": 8}
"""Bits of a code, by format."""

PACKED = {format: 8 // math.gcd(8, bits) for format, bits in BITS.items()}
"""Least number of codes that fill whole bytes, by format."""

CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Candidate shares of a group's range for `clip`; values outside the range get the nearest code."""

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max


def quantize(values: Tensor, format: str, dim: int, *, clip: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize `values`; all elements along `dim` are one group.

    Integer codes are evenly spaced from the minimum to the maximum: `code · scale + zero` is within half a step of the
    value, plus the rounding of the scale near the maximum. With `clip` they span the share of that range in `CLIPS`
    with the least squared error. An fp8 code times the scale is within a sixteenth of the value, or within 2^-10
    scales if that is more.

    Returns:
        Codes in the shape of `values`, uint8 (the bit pattern for fp8); scale and zero point, of size 1 along `dim`, in
        the dtype of `values`. The zero point is None for fp8.
    """
    exact = values.to(torch.promote_types(values.dtype, torch.float32))
    if format == "fp8":
        scale = (exact.abs().amax(dim, keepdim=True) / FLOAT8_MAX).to(values.dtype)
        # The rounded scale may be too small for the maximum; older torch gives NaN beyond the range.
        codes = (exact / _divisor(scale, exact.dtype)).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
        return codes.view(torch.uint8), scale, None
    least, greatest = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    codes, scale, zero = _evenly_spaced(exact, least, greatest, format, values.dtype)
    if clip:
        error = _squared_error(exact, codes, scale, zero, dim)
        for share in CLIPS[1:]:
            middle, half = (greatest + least) / 2, (greatest - least) * (share / 2)
            candidate = _evenly_spaced(exact, middle - half, middle + half, format, values.dtype)
            candidate_error = _squared_error(exact, *candidate, dim)
            better = candidate_error < error
            codes, scale, zero = (
                torch.where(better, new, old) for new, old in zip(candidate, (codes, scale, zero), strict=True)
            )
            error = torch.minimum(error, candidate_error)
    return codes.to(torch.uint8), scale, zero


def _evenly_spaced(
    exact: Tensor, least: Tensor, greatest: Tensor, format: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize to integer codes that span `least` to `greatest`; codes in the dtype of `exact`, the rest in `dtype`."""
    max_code = 2 ** BITS[format] - 1
    scale = ((greatest - least) / max_code).to(dtype)
    codes = ((exact - least) / _divisor(scale, exact.dtype)).round_().clamp_(0, max_code)
    return codes, scale, least.to(dtype)


def _squared_error(exact: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, dim: int) -> Tensor:
    return (
        torch.addcmul(zero.to(exact.dtype), codes, scale.to(exact.dtype)).sub_(exact).square_().sum(dim, keepdim=True)
    )


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Compute `codes · scale + zero`, or fp8 codes times the scale, in fp32 at least; returns the dtype of `scale`."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    if zero is None:
        return (codes.contiguous().view(FLOAT8).to(wide) * scale.to(wide)).to(scale.dtype)
    return torch.addcmul(zero.to(wide), codes.to(wide), scale.to(wide)).to(scale.dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., n, d] below 2^bits, uint8, into bytes [..., n·bits/8, d]; n must fill whole bytes.

    Consecutive codes are adjacent, the first in the lowest bits: eight 3-bit codes fill three bytes.
    """
    if bits == 8:
        return codes
    size = math.lcm(8, bits)  # least bits that hold whole codes and whole bytes
    parts = codes.unflatten(-2, (codes.shape[-2] * bits // size, size // bits))
    if size == 8:
        return (parts << _shifts(bits, 8, codes)).sum(dim=-2, dtype=torch.uint8)
    word = (parts.int() << _shifts(bits, size, parts.int())).sum(dim=-2, keepdim=True, dtype=torch.int32)
    return ((word >> _shifts(8, size, word)) & 0xFF).to(torch.uint8).flatten(-3, -2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes [..., n·bits/8, d] from `pack` into codes [..., n, d] uint8."""
    if bits == 8:
        return packed
    size = math.lcm(8, bits)
    if size == 8:
        return ((packed.unsqueeze(-2) >> _shifts(bits, 8, packed)) & (2**bits - 1)).flatten(-3, -2)
    parts = packed.unflatten(-2, (packed.shape[-2] * 8 // size, size // 8)).int()
    word = (parts << _shifts(8, size, parts)).sum(dim=-2, keepdim=True, dtype=torch.int32)
    return ((word >> _shifts(bits, size, word)) & (2**bits - 1)).to(torch.uint8).flatten(-3, -2)


def token_groups(width: int, group: int) -> int:
    """Return the number of groups of at most `group` channels in a token of `width` channels."""
    return -(-width // group)


def grouped_channels(tokens: Tensor, group: int) -> Tensor:
    """Reshape tokens [..., d] to [..., groups, size], with the channels that share a scale along the last dimension."""
    groups = token_groups(tokens.shape[-1], group)
    size = -(-tokens.shape[-1] // groups) if groups else group
    if missing := groups * size - tokens.shape[-1]:
        # Pad the last group by repeating the last channel, which does not change its scale.
        tokens = torch.cat([tokens, tokens[..., -1:].expand(*tokens.shape[:-1], missing)], dim=-1)
    return tokens.unflatten(-1, (groups, size))


def _divisor(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rounded scale as divisor; 1 where the scale is 0, as for equal values."""
    return scale.masked_fill(~(scale > 0), 1).to(dtype)


def _shifts(bits: int, size: int, like: Tensor) -> Tensor:
    """Return the shifts of consecutive `bits`-bit values in a word of `size` bits, [size/bits, 1], dtype of `like`."""
    return torch.arange(0, size, bits, dtype=like.dtype, device=like.device).unsqueeze(-1)
