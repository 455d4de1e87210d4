"""Helpers of the kernels of this operation: rows of any width in two power-of-two parts, and visibility."""

from __future__ import annotations

import triton
import triton.language as tl


def parts_of(width: int) -> tuple[int, int]:
    """Sizes of the tiles that hold a row: 192 → 128 + 64, 128 → 128 + 0, 112 → 64 + 64, its last 16 masked.

    The first is the largest power of two in `width`, the second the least that holds the rest; matrix instructions
    want 16 numbers at least.
    """
    first = max(16, 1 << (width.bit_length() - 1))
    rest = max(width - first, 0)
    return first, max(16, triton.next_power_of_2(rest)) if rest else 0


@triton.jit
def load_part(
    base, stride, row, row_mask, FROM: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr
):
    """Numbers FROM to FROM + SIZE of rows, zero behind WIDTH and, with MASK, in rows that are not there."""
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
    """Writes what `load_part` reads."""
    column = FROM + tl.arange(0, SIZE)
    place = base + row[:, None] * stride + column[None, :]
    tl.store(place, tile.to(base.dtype.element_ty), mask=row_mask[:, None] & (column < WIDTH)[None, :])


@triton.jit
def row_limits(starts, lengths, batch, tokens, positions):
    """First and behind-the-last position of a row of the batch that are no padding, and that of its first query."""
    first = 0
    behind = positions
    if starts is not None:
        first = tl.maximum(tl.load(starts + batch), 0)
    if lengths is not None:
        behind = tl.minimum(tl.load(lengths + batch), positions)
    return first, behind, positions - tokens


@triton.jit
def interval(position, first, behind, window, bounds):
    """Positions from `low` to before `high` that queries at positions see, and which of these are queries at all.

    `bounds` is the row's part of the first plane.
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
    """Return the bounds of the loop of a block of queries over keys: its begin, the begin and end of keys that all see,
    its end.

    All but the end are multiples of BLOCK, and they ascend; keys between the second and the third need no mask.
    Queries that are none count for nothing.
    """
    begin = tl.min(tl.where(mask, low, positions), axis=0) // BLOCK * BLOCK
    end = tl.max(tl.where(mask, high, 0), axis=0)
    full_begin = tl.cdiv(tl.max(tl.where(mask, low, 0), axis=0), BLOCK) * BLOCK
    full_end = tl.min(tl.where(mask, high, positions), axis=0) // BLOCK * BLOCK
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(end, begin))
    full_end = tl.maximum(tl.minimum(full_end, end), full_begin)
    return begin, full_begin, full_end, end
