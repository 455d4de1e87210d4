r"""Absorbed latent attention over packed rows: values of 1 to 8 bits, and shared keys that are rotated when read.

A row is read as lanes of 16 bits, two bytes with the same fields. One instruction turns a field of two lanes into two
fp16 values: `lane & mask | 0x6400` is 1024 + c · 2^p exactly, with c the code and p the field's lowest bit. Lanes and
masks come from a table of slots (`row_slots.py`), so that one program reads rows of all patterns. Rows are keys and
values. They, queries and tables are loaded plane by plane where a product needs them, all but the first time from the
L1 cache: registers hold accumulators and turned queries alone.

**No scales in the loop.** With step s and mean m, channel j is s·(c - (2^b - 1)/2) + m = f_j · c·2^p + o_j. Queries
absorb f_j, and what o_j adds to all logits of a head is one number. Outputs get f_j and o_j after the softmax, whose
weights sum to 1. Queries are scaled by a power of two a head, so that fp16 holds them (`folded_queries.py`).

**The 1024** is subtracted, one instruction for two values, which is exact. Left in, it would cancel too: in logits as
one more constant, in outputs against the sum of weights. But an fp32 accumulator of the tensor cores would then hold
1024 · Σp beside sums of a few units, and truncation at every step of a long text would reach a percent of a level.

**Rotation.** Real and imaginary part of a pair are the two bytes of a lane. Keys turn by their place in the block, as a
table says; queries by the block's first position, and by one block's angle more at every step. Its
rounding adds up to 1e-7 a block. There are no transcendental functions. The mean is added before the rotation.

**First tokens** of a row, which the cache holds in full precision, are one more part of its split softmax: a small
kernel leaves it where the splits leave theirs, and the same merge adds all of them.
"""

# ruff: noqa: RUF005 - not every Triton knows starred tuples

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.backend import interpreted
from surgery.kernels.launch import Config, Launch, launches_of, size, strides
from surgery.kernels.lowrank_decode.kernel import rotation_at
from surgery.kernels.lowrank_decode.reference import STEP
from surgery.kernels.mla_decode.folded_queries import FoldedQueries, affine, fold_queries_kernel
from surgery.kernels.mla_decode.kernel import rope_block
from surgery.kernels.mla_decode.packed_reference import packed_latent_attention
from surgery.kernels.mla_decode.row_slots import row_bytes, slot_table
from surgery.kernels.online_softmax import LOG2E, log_of, softmax_step
from surgery.kernels.split_kv import merge_launch, split_tokens, splits_of
from surgery.kernels.tuned import key_of, tuned

FIRST_BLOCK = 16
"""First tokens that the kernel takes, at most: a tile of a product."""


def default_config(rank: int, pairs: int, dtype: torch.dtype) -> Config:
    """The configuration to begin with."""
    slots = max(rank // 2, pairs)
    chunk = 64 if slots > 128 else 32 if slots > 16 else 16
    return Config(16, 16 if dtype == torch.float32 else 64, chunk, None, 8 if chunk == 64 else 4, 2)


@launches_of(packed_latent_attention)
def launches(
    args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None, lop3: bool | None = None
) -> list[Launch]:
    """Return the launches that fill `out` [B, T, H, r] and `lse` [B, T, H] fp32, both contiguous.

    Args:
        args: arguments of `mla_decode_packed`; the last dimension of each is contiguous.
        lop3: whether fields are taken out by PTX, which Triton's interpreter does not know; None asks it.
    """
    query, rows, pages, exact, rank = args.query, args.rows, args.pages, args.exact, args.rank
    batch, tokens, heads, _ = query.shape
    pairs, lanes = (query.shape[-1] - rank) // 2, row_bytes(args.fields) // 2
    gains = rows.shape[-1] - lanes
    page = 0 if pages is None else rows.shape[1]
    capacity = rows.shape[1] if pages is None else pages.shape[1] * page
    if config is None:
        shape = key_of(heads=tokens * heads, rank=rank, rope=2 * pairs, dtype=query.dtype)
        config = tuned("mla_decode_packed", shape, query.device, default_config(rank, pairs, query.dtype))
    blocks = triton.cdiv(tokens * heads, config.block_rows)
    splits = splits_of(config, batch * blocks, query, capacity, args.window)
    slots = splits + (exact is not None)
    parts = logs = None
    if slots > 1:
        parts = query.new_empty(batch * tokens * heads, slots, rank, dtype=torch.float32)
        logs = query.new_empty(batch * tokens * heads, slots, dtype=torch.float32)
    planes, rope_planes = triton.cdiv(rank // 2, config.chunk), triton.cdiv(pairs, config.chunk)
    queries = FoldedQueries.empty(query, blocks, planes, rope_planes, config)
    common = {
        "out": out if parts is None else parts,
        "log": lse if logs is None else logs,
        "scale": float(args.scale),
        "begin_rows": 0 if args.begins is None else size(args.begins, 1),
        "capacity": size(rows if pages is None else pages, 1),
        "splits": splits,
        "slots": slots,
        "first_tokens": 0 if exact is None else exact.shape[1],
        "new_tokens": tokens,
        "heads": heads,
        "HEADS_PER_GAIN": heads // gains if gains else 0,
        "gain_lane": lanes,
        **strides("row", "token", "head", query=query),
        **strides("row", pages=pages),
        "RANK": rank,
        "PAIRS": pairs,
        "PAGE": page,
        "STEP": STEP,
        "BLOCK_ROWS": config.block_rows,
    }
    tables = {
        "entries": slot_table(args.fields, rank, config.chunk, query.device),
        "PLANES": planes,
        "ROPE_PLANES": rope_planes,
        **queries._asdict(),
    }
    fold = Launch.of(
        fold_queries_kernel,
        (blocks, batch),
        Config(config.block_rows, warps=4, stages=1),
        vars(args),
        **common,
        **tables,
        CHUNK=config.chunk,
    )
    fold = replace(fold, scratch=tuple(queries))
    launch = Launch.of(
        mla_decode_packed_kernel,
        (blocks, splits, batch),
        config,
        vars(args),
        **common,
        **strides("row", "token", rows=rows),
        **tables,
        zero=0,
        CHUNK=config.chunk,
        WIDE=query.dtype == torch.float32,
        LOP3=not interpreted() if lop3 is None else lop3,
        BLOCK_TOKENS=config.block_tokens,
    )
    if parts is None:
        return [fold, launch]
    launch = replace(launch, scratch=(parts, logs))
    merge = merge_launch(parts, logs, out, lse)
    if exact is None:
        return [fold, launch, merge]
    chunk = min(64, rope_block(rank))
    first = Launch.of(
        first_tokens_kernel,
        (blocks, batch),
        Config(config.block_rows, warps=4, stages=1),
        vars(args),
        **common,
        **strides("row", "token", exact=exact, rows=rows),
        CHUNK=chunk,
        PAIR_BLOCK=rope_block(pairs),
        FIRST=FIRST_BLOCK,
    )
    return [fold, launch, first, merge]


def unsupported(dtype: torch.dtype) -> str | None:
    """Return why no GPU is given queries of a dtype; None if one is."""
    return "no kernel for fp32 queries over packed rows" if dtype == torch.float32 else None


@triton.jit
def lanes_of(rows_at, entry, mask):
    """Lanes [tokens, slots] of a plane; 0 of tokens without `mask`."""
    at = rows_at[:, None] + (entry >> 8)[None, :]
    return tl.load(at, mask=mask[:, None] & (entry >= 0)[None, :], other=0)


@triton.jit
def field(lanes, entry, BYTE: tl.constexpr, WIDE: tl.constexpr, LOP3: tl.constexpr):
    """Fields c of a plane, in the low or high byte of lanes [tokens, slots], as numbers c · 2^p: fp16, fp32 if WIDE."""
    SHIFT: tl.constexpr = 8 * BYTE
    mask = (entry & 255).to(tl.int16)[None, :]
    if WIDE:
        return ((lanes >> SHIFT) & mask).to(tl.float32)
    if not LOP3:
        value = (((lanes >> SHIFT) & mask) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    elif BYTE == 0:
        # Two lanes of a register at once, which the compiler does not find by itself.
        value = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x64006400, 0xea;", "=r,r,r", [lanes, mask], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        value = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 8; lop3.b32 $0, t, $2, 0x64006400, 0xea; }", "=r,r,r", [lanes, mask],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return value - 1024.0


# These grow with a text: not worth a compilation each.
@triton.jit(do_not_specialize=["capacity", "begin_rows", "splits", "slots", "zero", "pages_row"])
def mla_decode_packed_kernel(
    rows, step, mean, entries, folded, turned, numbers, within, begins, out, log, lengths, starts, exact_starts, pages,
    scale, capacity, begin_rows, splits, slots, zero, first_tokens, new_tokens, heads, gain_lane, window, rows_row,
    rows_token, pages_row,
    RANK: tl.constexpr, PAIRS: tl.constexpr, HEADS_PER_GAIN: tl.constexpr, PLANES: tl.constexpr,
    ROPE_PLANES: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
    LOP3: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS query rows against one split of the packed tokens of one row of the batch."""
    dtype: tl.constexpr = tl.float32 if WIDE else tl.float16
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    block_row = tl.arange(0, BLOCK_ROWS)
    row = tl.program_id(0) * BLOCK_ROWS + block_row
    real = row < new_tokens * heads
    new_token, head = row // heads, row % heads
    column, offs_n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_TOKENS)
    block = batch * tl.num_programs(0) + tl.program_id(0)
    query_tile = block_row[:, None] * CHUNK + column[None, :]
    unit = tl.load(numbers + block * 2 * BLOCK_ROWS + block_row)
    constant = tl.load(numbers + block * 2 * BLOCK_ROWS + BLOCK_ROWS + block_row)

    if PAGE > 0:
        capacity *= PAGE
    length = capacity if lengths is None else tl.minimum(tl.load(lengths + batch), capacity)
    position = length - new_tokens + new_token
    low = 0 if starts is None else tl.load(starts + batch)
    behind_first = first_tokens if exact_starts is None else tl.load(exact_starts + batch) + first_tokens
    low = tl.maximum(low, behind_first)
    first_seen = tl.zeros((BLOCK_ROWS,), tl.int32)
    if window is not None:
        first_seen = position - window + 1
        low = tl.maximum(low, length - new_tokens - window + 1)
    start, stop = split_tokens(low, length, split, splits, BLOCK_TOKENS)

    acc = ()
    for _i in tl.static_range(2 * PLANES):
        acc = acc + (tl.zeros((BLOCK_ROWS, CHUNK), tl.float32),)
    rope_queries = ()
    for i in tl.static_range(ROPE_PLANES):
        pair = i * CHUNK + column
        turned_at = turned + (block * ROPE_PLANES + i) * 2 * BLOCK_ROWS * CHUNK + query_tile
        real_part, imag_part = tl.load(turned_at), tl.load(turned_at + BLOCK_ROWS * CHUNK)
        cos, sin = rotation_at(within, begins, begin_rows, start, pair, pair < PAIRS, PAIRS, STEP)
        rope_queries = rope_queries + (
            real_part * cos[None, :] + imag_part * sin[None, :],
            imag_part * cos[None, :] - real_part * sin[None, :],
        )

    m_i = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    l_i = tl.zeros((BLOCK_ROWS,), tl.float32)
    for first in range(start, stop, BLOCK_TOKENS):
        token = first + offs_n
        mask = token < stop
        if PAGE > 0:
            base = tl.load(pages + batch * pages_row + token // PAGE, mask=mask, other=0).to(tl.int64)
            place = (token % PAGE).to(tl.int64)
        else:
            base = batch
            place = token.to(tl.int64)
        rows_at = rows + base * rows_row + place * rows_token
        # 0, which the compiler does not know: else it would hold in registers what is the same in all steps.
        nothing = first * zero

        logits = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
        for i in range(PLANES):
            entry = tl.load(entries + i * CHUNK + column)
            plane = lanes_of(rows_at, entry, mask)
            for byte in tl.static_range(2):
                folded_at = folded + ((block * PLANES + i) * 2 + byte) * BLOCK_ROWS * CHUNK + query_tile
                tile = field(plane, entry, byte, WIDE, LOP3)
                logits = tl.dot(tl.load(folded_at), tl.trans(tile), logits, input_precision="ieee")
        following = ()
        for i in tl.static_range(ROPE_PLANES):
            slot, pair = RANK // 2 + i * CHUNK + column, i * CHUNK + column
            rope_entry = tl.load(entries + nothing + (PLANES + i) * CHUNK + column)
            rope_plane = lanes_of(rows_at, rope_entry, mask)
            inside, factor, offset = affine(step + nothing, mean, rope_entry, slot, 0)
            near = field(rope_plane, rope_entry, 0, WIDE, LOP3)
            near += (offset / tl.where(inside, factor, 1.0)).to(dtype)[None, :]
            inside, factor, offset_far = affine(step + nothing, mean, rope_entry, slot, 1)
            far = field(rope_plane, rope_entry, 1, WIDE, LOP3)
            far += (offset_far / tl.where(inside, factor, 1.0)).to(dtype)[None, :]
            table = within + nothing + offs_n[:, None] * PAIRS + pair[None, :]
            cos_n = tl.load(table, mask=inside[None, :], other=0.0).to(dtype)
            sin_n = tl.load(table + STEP * PAIRS, mask=inside[None, :], other=0.0).to(dtype)
            query_near, query_far = rope_queries[2 * i], rope_queries[2 * i + 1]
            logits = tl.dot(query_near.to(dtype), tl.trans(near * cos_n - far * sin_n), logits, input_precision="ieee")
            logits = tl.dot(query_far.to(dtype), tl.trans(near * sin_n + far * cos_n), logits, input_precision="ieee")
            cos, sin = rotation_at(within + nothing, begins, begin_rows, BLOCK_TOKENS, pair, pair < PAIRS, PAIRS, STEP)
            following = following + (
                query_near * cos[None, :] + query_far * sin[None, :],
                query_far * cos[None, :] - query_near * sin[None, :],
            )
        rope_queries = following

        logits = (logits * unit[:, None] + constant[:, None]) * (scale * LOG2E)
        if HEADS_PER_GAIN > 0:
            gain_at = rows_at[None, :] + (gain_lane + head // HEADS_PER_GAIN)[:, None]
            gain = tl.load(gain_at, mask=real[:, None] & mask[None, :], other=0).to(tl.float16, bitcast=True)
            logits *= gain.to(tl.float32)
        visible = (token[None, :] <= tl.minimum(position, stop - 1)[:, None]) & (token[None, :] >= first_seen[:, None])
        logits = tl.where(visible, logits, -float("inf"))

        weights, m_i, l_i, alpha = softmax_step(logits, m_i, l_i, 1)
        weights = weights.to(dtype)
        added = ()
        for i in tl.static_range(PLANES):
            value_entry = tl.load(entries + nothing + i * CHUNK + column)
            value_plane = lanes_of(rows_at, value_entry, mask)
            for byte in tl.static_range(2):
                tile = field(value_plane, value_entry, byte, WIDE, LOP3)
                added = added + (tl.dot(weights, tile, acc[2 * i + byte] * alpha[:, None], input_precision="ieee"),)
        acc = added

    inverse = 1.0 / tl.where(l_i > 0, l_i, 1.0)
    index = (batch * new_tokens * heads + row) * slots + split
    for i in tl.static_range(PLANES):
        out_entry = tl.load(entries + i * CHUNK + column)
        for byte in tl.static_range(2):
            channel = 2 * (i * CHUNK + column) + byte
            inside, factor, offset = affine(step, mean, out_entry, i * CHUNK + column, byte)
            value = acc[2 * i + byte] * inverse[:, None] * factor[None, :] + offset[None, :]
            value = tl.where((l_i > 0)[:, None], value, 0.0).to(out.dtype.element_ty)
            tl.store(out + index[:, None] * RANK + channel[None, :], value, mask=real[:, None] & inside[None, :])
    tl.store(log + index, log_of(m_i, l_i), mask=real)


# These grow with a text: not worth a compilation each.
@triton.jit(do_not_specialize=["capacity", "begin_rows", "splits", "slots", "pages_row"])
def first_tokens_kernel(
    query, rows, exact, within, begins, out, log, lengths, starts, exact_starts, pages, scale, capacity, begin_rows,
    splits, slots, first_tokens, new_tokens, heads, gain_lane, window, query_row, query_token,
    query_head, exact_row, exact_token, rows_row, rows_token, pages_row,
    RANK: tl.constexpr, PAIRS: tl.constexpr, HEADS_PER_GAIN: tl.constexpr, CHUNK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr, BLOCK_ROWS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS query rows against the first tokens of one row of the batch: the last part.

    They are read once for logits and once more, from a cache of the GPU, as values.
    """
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < new_tokens * heads
    new_token, head = row // heads, row % heads
    column, pair, slot = tl.arange(0, CHUNK), tl.arange(0, PAIR_BLOCK), tl.arange(0, FIRST)
    query_at = query + batch * query_row + new_token.to(tl.int64) * query_token + head.to(tl.int64) * query_head

    if PAGE > 0:
        capacity *= PAGE
    length = capacity if lengths is None else tl.minimum(tl.load(lengths + batch), capacity)
    position = length - new_tokens + new_token
    token = slot if exact_starts is None else tl.load(exact_starts + batch) + slot
    mask = (slot < first_tokens) & (token < length)
    if starts is not None:
        mask = mask & (token >= tl.load(starts + batch))
    exact_at = exact + batch * exact_row + slot * exact_token

    logits = tl.zeros((BLOCK_ROWS, FIRST), tl.float32)
    for i in range(0, RANK, CHUNK):
        inside = i + column < RANK
        part = tl.load(query_at[:, None] + (i + column)[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        tile = tl.load(exact_at[:, None] + (i + column)[None, :], mask=mask[:, None] & inside[None, :], other=0.0)
        logits = tl.dot(part, tl.trans(tile), logits, input_precision="ieee")
    if PAIRS > 0:
        is_pair = pair < PAIRS
        query_mask, exact_mask = real[:, None] & is_pair[None, :], mask[:, None] & is_pair[None, :]
        at = query_at[:, None] + (RANK + 2 * pair)[None, :]
        query_near = tl.load(at, mask=query_mask, other=0.0)
        query_far = tl.load(at + 1, mask=query_mask, other=0.0)
        at = exact_at[:, None] + (RANK + 2 * pair)[None, :]
        near = tl.load(at, mask=exact_mask, other=0.0).to(tl.float32)
        far = tl.load(at + 1, mask=exact_mask, other=0.0).to(tl.float32)
        cos, sin = rotation_at(within, begins, begin_rows, token[:, None], pair[None, :], exact_mask, PAIRS, STEP)
        turned_near = (near * cos - far * sin).to(query.dtype.element_ty)
        turned_far = (near * sin + far * cos).to(query.dtype.element_ty)
        logits = tl.dot(query_near, tl.trans(turned_near), logits, input_precision="ieee")
        logits = tl.dot(query_far, tl.trans(turned_far), logits, input_precision="ieee")

    logits *= scale * LOG2E
    if HEADS_PER_GAIN > 0:
        base, place = batch + tl.zeros_like(token).to(tl.int64), token.to(tl.int64)
        if PAGE > 0:
            base = tl.load(pages + batch * pages_row + token // PAGE, mask=mask, other=0).to(tl.int64)
            place = (token % PAGE).to(tl.int64)
        gain_at = rows + (base * rows_row + place * rows_token)[None, :] + (gain_lane + head // HEADS_PER_GAIN)[:, None]
        gain = tl.load(gain_at, mask=real[:, None] & mask[None, :], other=0).to(tl.float16, bitcast=True)
        logits *= gain.to(tl.float32)
    visible = mask[None, :] & (token[None, :] <= position[:, None])
    if window is not None:
        visible = visible & (token[None, :] > (position - window)[:, None])
    logits = tl.where(visible, logits, -float("inf"))
    m_i = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    weights, m_i, l_i, _ = softmax_step(logits, m_i, tl.zeros((BLOCK_ROWS,), tl.float32), 1)
    weights = (weights / tl.where(l_i > 0, l_i, 1.0)[:, None]).to(query.dtype.element_ty)

    index = (batch * new_tokens * heads + row) * slots + splits
    for i in range(0, RANK, CHUNK):
        inside = i + column < RANK
        tile = tl.load(exact_at[:, None] + (i + column)[None, :], mask=mask[:, None] & inside[None, :], other=0.0)
        value = tl.dot(weights, tile, input_precision="ieee").to(out.dtype.element_ty)
        tl.store(out + index[:, None] * RANK + (i + column)[None, :], value, mask=real[:, None] & inside[None, :])
    tl.store(log + index, log_of(m_i, l_i), mask=real)
