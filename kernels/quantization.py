"""Quantized values of tokens as numbers, in plain PyTorch.

The format is KIVI's (Liu et al., arXiv 2402.02750): integers of 8, 4 or 2 bits, c standing for c · scale + zero, or fp8
(e4m3), c standing for c · scale. A scale is shared by `group` tokens of a channel, or by channels of a token, in
groups that are nearly equal. Consecutive tokens share a byte, the first in its lowest bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {"int8": 8, "int4": 4, "int2": 2, "fp8": 8}
"""Bits of a quantized value, by format."""


def dequantized(
    codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int | None, dtype: torch.dtype
) -> Tensor:
    """Tokens [..., S, d] in `dtype` of codes [..., S·bits/8, d], not rounded to another dtype on the way.

    Args:
        scale, zero: by channel [..., S/group, d], by token [..., S, groups of d]; no zero is fp8.
        group: tokens that share a scale by channel; None by token.
    """
    numbers = unpack(codes, bits)
    numbers = (numbers.view(torch.float8_e4m3fn) if zero is None else numbers).to(dtype)
    scale = spread(scale.to(dtype), numbers.shape, group)
    return (
        numbers * scale if zero is None else torch.addcmul(spread(zero.to(dtype), numbers.shape, group), numbers, scale)
    )


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Bytes [..., n·bits/8, d] → codes [..., n, d]."""
    if bits == 8:
        return codes.contiguous()
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)[:, None]
    return ((codes.unsqueeze(-2) >> shifts) & (2**bits - 1)).flatten(-3, -2)


def spread(factor: Tensor, shape: torch.Size, group: int | None) -> Tensor:
    """A scale or zero point of each group → one for each number of tokens [..., S, d]."""
    if group is not None:
        return factor.repeat_interleave(group, dim=-2)[..., : shape[-2], :]
    return factor.repeat_interleave(group_size(shape[-1], factor.shape[-1]), dim=-1)[..., : shape[-1]]


def group_size(width: int, groups: int) -> int:
    """Channels that share a scale by token; the last group has what is left."""
    return -(-width // max(groups, 1))
