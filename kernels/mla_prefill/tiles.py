"""Helpers of the prefill kernels: rows of any width in two power-of-two tiles, and visibility intervals."""

from __future__ import annotations

import triton
import triton.language as tl


def parts_of(width: int) -> tuple[int, int]:
    """Return the sizes of the two tiles of a row: 192 → 128 + 64, 128 → 128 + 0, 112 → 64 + 64 with 16 masked.

    The first is the largest power of two up to `width`, the second the smallest that holds the rest; each tile has at
    least the 16 elements of a matrix instruction.
    """
    first = max(16, 1 << (width.bit_length() - 1))
    rest = max(width - first, 0)
    return first, max(16, triton.next_power_of_2(rest)) if rest else 0


@triton.jit
def load_part(
    base, stride, row, row_mask, FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr
):
    """Load elements FROM to FROM + SIZE of rows; zero past WIDTH and, with MASK, in rows outside `row_mask`."""
    column = FROM + tl.arange(0, SIZE)
    place = base + row[:, None] * stride + column[None, :]
    if MASK:
        tile = tl.load(place, mask=row_mask[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif FROM + SIZE > WIDTH:
        tile = tl.load(place, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(place)
    return tile


@triton.jit
def store_part(base, stride, row, row_mask, tile, FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Store elements FROM to FROM + SIZE of rows, up to WIDTH."""
    column = FROM + tl.arange(0, SIZE)
    place = base + row[:, None] * stride + column[None, :]
    tl.store(place, tile.to(base.dtype.element_ty), mask=row_mask[:, None] & (column < WIDTH)[None, :])


@triton.jit
def row_limits(starts, lengths, batch, tokens, positions):
    """Return start and end of a row's positions without padding, and the position of its first query."""
    first = 0
    behind = positions
    if starts is not None:
        first = tl.maximum(tl.load(starts + batch), 0)
    if lengths is not None:
        behind = tl.minimum(tl.load(lengths + batch), positions)
    return first, behind, positions - tokens


@triton.jit
def interval(position, first, behind, window, bounds):
    """Return the interval [low, high) that the query at each position sees, and the mask of queries without padding.

    `bounds` points to the row's document starts.
    """
    mask = (position >= first) & (position < behind)
    low = tl.zeros_like(position) + first
    high = tl.minimum(tl.zeros_like(position) + behind, position + 1)
    if window is not None:
        low = tl.maximum(low, position - window + 1)
    if bounds is not None:
        low = tl.maximum(low, tl.load(bounds + position, mask=mask, other=0))
    return low, high, mask


@triton.jit
def key_blocks(low, high, mask, positions, BLOCK: tl.constexpr):
    """Return begin, full_begin, full_end and end of a query block's loop over keys; queries outside `mask` are ignored.

    They ascend, and all but `end` are multiples of BLOCK. All queries see the keys from full_begin to full_end.
    """
    begin = tl.min(tl.where(mask, low, positions), axis=0) // BLOCK * BLOCK
    end = tl.max(tl.where(mask, high, 0), axis=0)
    full_begin = tl.cdiv(tl.max(tl.where(mask, low, 0), axis=0), BLOCK) * BLOCK
    full_end = tl.min(tl.where(mask, high, positions), axis=0) // BLOCK * BLOCK
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(end, begin))
    full_end = tl.maximum(tl.minimum(full_end, end), full_begin)
    return begin, full_begin, full_end, end
