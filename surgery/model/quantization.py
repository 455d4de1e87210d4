"""Numbers quantized to 8, 4, 3 or 2 bits, and these codes as bytes.

Integers are asymmetric, a scale and a zero point a group; fp8 (e4m3) codes have a scale alone, which takes the largest
number of the group to the format's largest.

Where an error counts by its square, as it does in latents that are worth little each, two bits between the extremes of
a group are spent badly. With `clip` a group's range is narrowed to that of five which leaves the least squared error.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2, "fp8": 8}
"""Bits of a code, by format."""

PACKED = {format: 8 // math.gcd(8, bits) for format, bits in BITS.items()}
"""Codes that fill whole bytes, at least, by format."""

CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of the range of a group between which `clip` chooses; numbers beyond take the nearest code."""

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max


def quantize(values: Tensor, format: str, dim: int, *, clip: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of `values`, whose groups lie along `dim`.

    Integers are evenly spaced from the least value to the greatest: a value is `code · scale + zero` to within half a
    step, and near the greatest value the rounding of the step. With `clip` they are spaced over the share of that range
    among `CLIPS` that leaves the group the least squared error. An fp8 code times the scale is a value to within a
    sixteenth of it, or 2^-10 scales if that is more.

    Returns:
        Codes of the shape of `values`, uint8, of fp8 the bits of the number; scale and zero, of size 1 along `dim`, in
        the dtype of `values`. fp8 has no zero.
    """
    exact = values.to(_wide(values.dtype))
    if format == "fp8":
        scale = (exact.abs().amax(dim, keepdim=True) / FLOAT8_MAX).to(values.dtype)
        # The scale as it is stored may be too small for the greatest value; beyond the range older torch gives NaN.
        codes = (exact / _divisor(scale, exact.dtype)).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
        return codes.view(torch.uint8), scale, None
    least, greatest = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    codes, scale, zero = _evenly_spaced(exact, least, greatest, format, values.dtype)
    if clip:
        error = _squared_error(exact, codes, scale, zero, dim)
        for share in CLIPS[1:]:
            middle, half = (greatest + least) / 2, (greatest - least) * (share / 2)
            other = _evenly_spaced(exact, middle - half, middle + half, format, values.dtype)
            its_error = _squared_error(exact, *other, dim)
            better = its_error < error
            codes, scale, zero = (
                torch.where(better, new, old) for new, old in zip(other, (codes, scale, zero), strict=True)
            )
            error = torch.minimum(error, its_error)
    return codes.to(torch.uint8), scale, zero


def _evenly_spaced(
    exact: Tensor, least: Tensor, greatest: Tensor, format: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in the dtype of `exact`, scale and zero in `dtype`, of integers from `least` to `greatest`."""
    max_code = 2 ** BITS[format] - 1
    scale = ((greatest - least) / max_code).to(dtype)
    codes = ((exact - least) / _divisor(scale, exact.dtype)).round_().clamp_(0, max_code)
    return codes, scale, least.to(dtype)


def _squared_error(exact: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, dim: int) -> Tensor:
    return (
        torch.addcmul(zero.to(exact.dtype), codes, scale.to(exact.dtype)).sub_(exact).square_().sum(dim, keepdim=True)
    )


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """`codes · scale + zero`, or fp8 codes times the scale; in fp32 at least, then in the dtype of `scale`."""
    wide = _wide(scale.dtype)
    if zero is None:
        return (codes.contiguous().view(FLOAT8).to(wide) * scale.to(wide)).to(scale.dtype)
    return torch.addcmul(zero.to(wide), codes.to(wide), scale.to(wide)).to(scale.dtype)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n, d] below 2^bits, uint8, as bytes [..., n·bits/8, d]; n must fill whole bytes.

    Bits of consecutive codes follow each other, the first code in the lowest: eight of three bits fill three bytes.
    """
    if bits == 8:
        return codes
    size = math.lcm(8, bits)  # bits that begin and end with a code and with a byte
    parts = codes.unflatten(-2, (codes.shape[-2] * bits // size, size // bits))
    if size == 8:
        return (parts << _shifts(bits, 8, codes)).sum(dim=-2, dtype=torch.uint8)
    word = (parts.int() << _shifts(bits, size, parts.int())).sum(dim=-2, keepdim=True, dtype=torch.int32)
    return ((word >> _shifts(8, size, word)) & 0xFF).to(torch.uint8).flatten(-3, -2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the values that `pack` packed: [..., n, d] uint8 of bytes [..., n·bits/8, d]."""
    if bits == 8:
        return packed
    size = math.lcm(8, bits)
    if size == 8:
        return ((packed.unsqueeze(-2) >> _shifts(bits, 8, packed)) & (2**bits - 1)).flatten(-3, -2)
    parts = packed.unflatten(-2, (packed.shape[-2] * 8 // size, size // 8)).int()
    word = (parts << _shifts(8, size, parts)).sum(dim=-2, keepdim=True, dtype=torch.int32)
    return ((word >> _shifts(bits, size, word)) & (2**bits - 1)).to(torch.uint8).flatten(-3, -2)


def token_groups(width: int, group: int) -> int:
    """Groups in which the `width` channels of one token are quantized: the fewest of at most `group`."""
    return -(-width // group)


def grouped_channels(tokens: Tensor, group: int) -> Tensor:
    """Tokens [..., d] with the channels that share a scale as a dimension of their own: [..., groups, size]."""
    groups = token_groups(tokens.shape[-1], group)
    size = -(-tokens.shape[-1] // groups) if groups else group
    if missing := groups * size - tokens.shape[-1]:
        # The last channel again, so that the last groups are as long as the first and no scale changes.
        tokens = torch.cat([tokens, tokens[..., -1:].expand(*tokens.shape[:-1], missing)], dim=-1)
    return tokens.unflatten(-1, (groups, size))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _divisor(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it is stored, which decides the codes; 1 where it is 0, as it is of equal values."""
    return scale.masked_fill(~(scale > 0), 1).to(dtype)


def _shifts(bits: int, size: int, like: Tensor) -> Tensor:
    """Return the shifts of values of so many bits in `size` bits, [size/bits, 1] in the dtype of another tensor."""
    return torch.arange(0, size, bits, dtype=like.dtype, device=like.device).unsqueeze(-1)
