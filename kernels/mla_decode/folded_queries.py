"""Queries that absorb the steps and means of packed rows, once for all splits of a text.

Channel j of a row with field c is `f_j · c·2^p + o_j`, see `packed_kernel.py`. A query takes up f_j; what the
offsets o_j of a latent add to all its logits is one number. Those of shared keys are added before the rotation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config


class FoldedQueries(NamedTuple):
    """Memory of one call; planes, bytes, query rows and slots are the last four dimensions of the first two.

    Attributes:
        folded: of the latent's planes, fp16, or fp32 for fp32 queries; divided by `unit`.
        turned: of the shared key's, fp32, not rotated; divided by `unit`.
        numbers: `unit`, a power of two, and what offsets add to logits, fp32 [B · blocks, 2, rows].
    """

    folded: Tensor
    turned: Tensor
    numbers: Tensor

    @classmethod
    def empty(cls, query: Tensor, blocks: int, planes: int, rope_planes: int, config: Config) -> FoldedQueries:
        """Memory for queries [B, T, H, ·] in so many blocks of rows."""
        tile, count = (2, config.block_rows, config.chunk), len(query) * blocks
        dtype = torch.float32 if query.dtype == torch.float32 else torch.float16
        return cls(
            query.new_empty(count, planes, *tile, dtype=dtype),
            query.new_empty(count, rope_planes, *tile, dtype=torch.float32),
            query.new_empty(count, 2, config.block_rows, dtype=torch.float32),
        )


@triton.jit
def affine(step, mean, entry, slot, BYTE: tl.constexpr):
    """Whether there is a slot, and the factor and offset that turn its field in a byte into its channel's value."""
    inside, mask = entry >= 0, entry & 255
    width = tl.load(step + 2 * slot + BYTE, mask=inside, other=0.0)
    factor = width / (mask & -mask).to(tl.float32)
    offset = tl.load(mean + 2 * slot + BYTE, mask=inside, other=0.0) - 0.5 * mask.to(tl.float32) * factor
    return inside, factor, offset


@triton.jit
def read_plane(query_at, step, mean, entry, slot, real, BYTE: tl.constexpr):
    """Queries [rows, slots] that read a plane, and what its offsets add to their logits [rows]."""
    inside, factor, offset = affine(step, mean, entry, slot, BYTE)
    at = query_at[:, None] + (2 * slot + BYTE)[None, :]
    part = tl.load(at, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return part * factor[None, :], tl.sum(part * offset[None, :], axis=1)


@triton.jit
def fold_queries_kernel(
    query, step, mean, entries, folded, turned, numbers, new_tokens, heads, query_row, query_token, query_head,
    RANK: tl.constexpr, PLANES: tl.constexpr, ROPE_PLANES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS query rows of one row of the batch."""
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, BLOCK_ROWS)
    row = tl.program_id(0) * BLOCK_ROWS + rows
    real = row < new_tokens * heads
    query_at = query + batch * query_row + (row // heads).to(tl.int64) * query_token
    query_at += (row % heads).to(tl.int64) * query_head
    column = tl.arange(0, CHUNK)
    block = batch * tl.num_programs(0) + tl.program_id(0)

    # The largest folded query of each row becomes 2^12.
    constant = tl.zeros((BLOCK_ROWS,), tl.float32)
    peak = tl.full((BLOCK_ROWS,), 1e-30, tl.float32)
    for i in range(PLANES + ROPE_PLANES):
        entry = tl.load(entries + i * CHUNK + column)
        slot = tl.where(i < PLANES, i * CHUNK, RANK // 2 + (i - PLANES) * CHUNK) + column
        for byte in tl.static_range(2):
            part, shift = read_plane(query_at, step, mean, entry, slot, real, byte)
            peak = tl.maximum(peak, tl.max(tl.abs(part), axis=1))
            constant += tl.where(i < PLANES, shift, 0.0)
    unit = tl.exp2(tl.ceil(tl.log2(peak)) - 12.0)
    shrink = 1.0 / unit
    tl.store(numbers + block * 2 * BLOCK_ROWS + rows, unit)
    tl.store(numbers + block * 2 * BLOCK_ROWS + BLOCK_ROWS + rows, constant)

    tile = rows[:, None] * CHUNK + column[None, :]
    for i in range(PLANES):
        entry = tl.load(entries + i * CHUNK + column)
        for byte in tl.static_range(2):
            part, _ = read_plane(query_at, step, mean, entry, i * CHUNK + column, real, byte)
            at = folded + ((block * PLANES + i) * 2 + byte) * BLOCK_ROWS * CHUNK + tile
            tl.store(at, (part * shrink[:, None]).to(folded.dtype.element_ty))
    for i in range(ROPE_PLANES):
        entry = tl.load(entries + (PLANES + i) * CHUNK + column)
        for byte in tl.static_range(2):
            part, _ = read_plane(query_at, step, mean, entry, RANK // 2 + i * CHUNK + column, real, byte)
            tl.store(
                turned + ((block * ROPE_PLANES + i) * 2 + byte) * BLOCK_ROWS * CHUNK + tile, part * shrink[:, None]
            )
