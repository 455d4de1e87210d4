r"""Absorbed latent attention over packed rows: values of 1 to 8 bits, and shared keys that are rotated when read.

A row is read as lanes of 16 bits, two bytes with the same fields. One instruction turns a field of two lanes into two
fp16 values: `lane & mask | 0x6400` is 1024 + c · 2^p exactly, with c the code and p the field's lowest bit. A plane
(`packed_layout.py`) is such a mask over a tile of lanes; the same planes are keys and values.

**No scales in the loop.** With step s and mean m, channel j is s·(c - (2^b - 1)/2) + m = f_j · c·2^p + o_j. Queries
absorb f_j, and what o_j adds to all logits of a head is one number. Outputs get f_j and o_j after the softmax, whose
weights sum to 1. Queries are scaled by a power of two a head, so that fp16 holds them.

**The 1024** is subtracted, one instruction for two values, which is exact. Left in, it would cancel too: in logits as
one more constant, in outputs against the sum of weights. But an fp32 accumulator of the tensor cores would then hold
1024 · Σp beside sums of a few units, and truncation at every step of a long text would reach a percent of a level.

**Rotation.** Real and imaginary part of a pair are the two bytes of a lane. Keys turn by their place in the block, a
table that is loaded once; queries by the block's first position, and by one block's angle more at every step. Its
rounding adds up to 1e-7 a block. There are no transcendental functions. The mean is added before the rotation.

**What compiling showed** (Triton 3.9, sm_90, bf16, 16 query rows, 8 warps). Rows of 4 bits do not spill: 512 + 128
with 32 tokens a step, 256 + 128 with 64. Their loop loads rows asynchronously and has no other global loads. Rows of
mixed patterns spilled outside of it, in an earlier form; until they are looked at `unsupported` refuses them on GPUs.

**First tokens** of a row, which the cache holds in full precision, are one more part of its split softmax: a small
kernel leaves it where the splits leave theirs, and the same merge adds all of them.
"""

# ruff: noqa: RUF005 - not every Triton knows starred tuples

from __future__ import annotations

import math
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
from surgery.kernels.mla_decode.kernel import rope_block
from surgery.kernels.mla_decode.packed_layout import Section, channel_table, sections
from surgery.kernels.mla_decode.packed_reference import packed_latent_attention
from surgery.kernels.online_softmax import LOG2E, log_of, softmax_step
from surgery.kernels.split_kv import merge_launch, split_tokens, splits_of
from surgery.kernels.tuned import key_of, tuned

FIRST_BLOCK = 16
"""First tokens that the kernel takes, at most: a tile of a product."""


MOST_REGISTERS = 104
"""Most `held_registers` of a program that compiled without spills: 512 + 128 values of 4 bits, 32 tokens a step."""


def default_config(latent: Section, rope: Section, dtype: torch.dtype) -> Config:
    """The configuration to begin with, by what compiling showed."""
    lanes = max(latent.lanes, rope.lanes)
    chunk = 64 if lanes > 32 else 32 if lanes > 16 else 16
    warps = 8 if chunk == 64 else 4
    tokens = 16 if dtype == torch.float32 else 64
    while tokens > 16 and held_registers(Config(16, tokens, chunk, warps=warps), latent, rope) > MOST_REGISTERS:
        tokens //= 2
    return Config(16, tokens, chunk, None, warps, 3)


def held_registers(config: Config, latent: Section, rope: Section) -> int:
    """Registers of a thread that live through a step: accumulators, turned queries, cosines, means and masks."""
    threads, rows, tokens, chunk = 32 * config.warps, config.block_rows, config.block_tokens, config.chunk
    planes, rope_planes = latent.planes(chunk), rope.planes(chunk)
    part = 2 * rows * chunk // threads
    masks = sum(mask == 0 for _, mask in (*planes, *rope_planes)) * (chunk // 8 + 1)
    # A warp's product has eight tokens at least, and every warp all lanes of the means.
    table = chunk * (tokens + 8 * config.warps) // (2 * threads)
    return len(planes) * part + len(rope_planes) * (part + table + chunk // 4) + masks


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
    latent, rope = sections(args.fields, rank)
    gains = rows.shape[-1] - rope.lane - rope.lanes
    page = 0 if pages is None else rows.shape[1]
    capacity = rows.shape[1] if pages is None else pages.shape[1] * page
    if config is None:
        planes = len(latent.planes(32)), len(rope.planes(32))
        shape = key_of(heads=tokens * heads, planes=planes[0], rope_planes=planes[1], dtype=query.dtype)
        config = tuned("mla_decode_packed", shape, query.device, default_config(latent, rope, query.dtype))
    blocks = triton.cdiv(tokens * heads, config.block_rows)
    splits = splits_of(config, batch * blocks, query, capacity, args.window)
    slots = splits + (exact is not None)
    parts = logs = None
    if slots > 1:
        parts = query.new_empty(batch * tokens * heads, slots, rank, dtype=torch.float32)
        logs = query.new_empty(batch * tokens * heads, slots, dtype=torch.float32)
    align = math.gcd(
        16, rope.lane, rope.lanes, *(int(stride) for stride in strides("row", "token", rows=rows).values())
    )
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
        "gain_lane": rope.lane + rope.lanes,
        **strides("row", "token", "head", query=query),
        **strides("row", pages=pages),
        "RANK": rank,
        "PAIRS": (query.shape[-1] - rank) // 2,
        "PAGE": page,
        "STEP": STEP,
        "BLOCK_ROWS": config.block_rows,
    }
    launch = Launch.of(
        mla_decode_packed_kernel,
        (blocks, splits, batch),
        config,
        vars(args),
        **common,
        entries=channel_table(args.fields, rank, config.chunk, query.device),
        zero=0,
        latent_lanes=latent.lanes // align,
        rope_lanes=rope.lanes // align,
        **{name: stride // align for name, stride in strides("row", "token", rows=rows).items()},
        PLANES=latent.planes(config.chunk),
        ROPE_PLANES=rope.planes(config.chunk),
        TILES=triton.cdiv(latent.lanes, config.chunk),
        ROPE_TILES=triton.cdiv(rope.lanes, config.chunk),
        CHUNK=config.chunk,
        ALIGN=align,
        WIDE=query.dtype == torch.float32,
        LOP3=not interpreted() if lop3 is None else lop3,
        BLOCK_TOKENS=config.block_tokens,
    )
    if parts is None:
        return [launch]
    launch = replace(launch, scratch=(parts, logs))
    merge = merge_launch(parts, logs, out, lse)
    if exact is None:
        return [launch, merge]
    chunk = min(64, rope_block(rank))
    first = Launch.of(
        first_tokens_kernel,
        (blocks, batch),
        Config(config.block_rows, warps=4, stages=1),
        vars(args),
        **common,
        **strides("row", "token", exact=exact, rows=rows),
        CHUNK=chunk,
        PAIR_BLOCK=rope_block((query.shape[-1] - rank) // 2),
        FIRST=FIRST_BLOCK,
    )
    return [launch, first, merge]


def unsupported(latent: Section, rope: Section, dtype: torch.dtype) -> str | None:
    """Return why no GPU is given such rows: the program spills, or was not compiled; None if neither."""
    if dtype == torch.float32:
        return "no kernel for fp32 queries over packed rows"
    need = held_registers(default_config(latent, rope, dtype), latent, rope)
    if need <= MOST_REGISTERS:
        return None
    return f"runs of packed rows that take {need} registers, at most {MOST_REGISTERS}"


@triton.jit
def field(lanes, masks, BYTE: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr, LOP3: tl.constexpr):
    """Fields c of a plane, in the low or high byte of lanes [tokens, lanes], as numbers c · 2^p: fp16, fp32 if WIDE.

    `masks` are those of lanes, read where MASK is 0.
    """
    SHIFT: tl.constexpr = 8 * BYTE
    mask = masks[None, :] if MASK == 0 else tl.full((1, 1), MASK, tl.int16)
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


@triton.jit
def affine(step, mean, entry, BYTE: tl.constexpr):
    """Channel, whether there is one, and the factor and offset that turn its field into its value."""
    inside, channel, mask = entry >= 0, (entry >> 8) + BYTE, entry & 255
    width = tl.load(step + channel, mask=inside, other=0.0)
    factor = width / (mask & -mask).to(tl.float32)
    offset = tl.load(mean + channel, mask=inside, other=0.0) - 0.5 * mask.to(tl.float32) * factor
    return channel, inside, factor, offset


@triton.jit
def folded(query_at, step, mean, entry, real, BYTE: tl.constexpr):
    """Queries [rows, lanes] that read a plane, and what its offsets add to their logits [rows]."""
    channel, inside, factor, offset = affine(step, mean, entry, BYTE)
    part = tl.load(query_at[:, None] + channel[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    part = part.to(tl.float32)
    return part * factor[None, :], tl.sum(part * offset[None, :], axis=1)


# These grow with a text: not worth a compilation each.
@triton.jit(do_not_specialize=["capacity", "begin_rows", "splits", "slots", "zero", "pages_row"])
def mla_decode_packed_kernel(
    query, rows, step, mean, entries, within, begins, out, log, lengths, starts, exact_starts, pages, scale, capacity,
    begin_rows, splits, slots, zero, first_tokens, new_tokens, heads, gain_lane, latent_lanes, rope_lanes,
    window, query_row, query_token, query_head, rows_row, rows_token, pages_row,
    RANK: tl.constexpr, PAIRS: tl.constexpr, HEADS_PER_GAIN: tl.constexpr, PLANES: tl.constexpr,
    ROPE_PLANES: tl.constexpr, TILES: tl.constexpr, ROPE_TILES: tl.constexpr, CHUNK: tl.constexpr, ALIGN: tl.constexpr,
    PAGE: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr, LOP3: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS query rows against one split of the packed tokens of one row of the batch."""
    dtype: tl.constexpr = tl.float32 if WIDE else tl.float16
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < new_tokens * heads
    new_token, head = row // heads, row % heads
    lane, offs_n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_TOKENS)
    query_at = query + batch * query_row + new_token.to(tl.int64) * query_token + head.to(tl.int64) * query_head

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

    # The largest folded query of each row becomes 2^12.
    constant = tl.zeros((BLOCK_ROWS,), tl.float32)
    peak = tl.full((BLOCK_ROWS,), 1e-30, tl.float32)
    for i in tl.static_range(len(PLANES) + len(ROPE_PLANES)):
        entry = tl.load(entries + i * CHUNK + lane)
        for byte in tl.static_range(2):
            part, shift = folded(query_at, step, mean, entry, real, byte)
            peak = tl.maximum(peak, tl.max(tl.abs(part), axis=1))
            if i < len(PLANES):
                constant += shift
    unit = tl.exp2(tl.ceil(tl.log2(peak)) - 12.0)
    shrink = 1.0 / unit

    # 0, which the compiler does not know: else it would hold channels, factors and offsets of all planes from here on.
    entries += zero
    queries, acc, masks = (), (), ()
    for i in tl.static_range(len(PLANES)):
        entry = tl.load(entries + i * CHUNK + lane)
        masks = masks + ((entry & 255).to(tl.int16),)
        for byte in tl.static_range(2):
            part, _ = folded(query_at, step, mean, entry, real, byte)
            queries = queries + ((part * shrink[:, None]).to(dtype),)
            acc = acc + (tl.zeros((BLOCK_ROWS, CHUNK), tl.float32),)

    turned, advance, centers, table = (), (), (), ()
    for i in tl.static_range(len(ROPE_PLANES)):
        entry = tl.load(entries + (len(PLANES) + i) * CHUNK + lane)
        masks = masks + ((entry & 255).to(tl.int16),)
        inside, pair = entry >= 0, ((entry >> 8) - RANK) // 2
        real_part, _ = folded(query_at, step, mean, entry, real, 0)
        imag_part, _ = folded(query_at, step, mean, entry, real, 1)
        cos, sin = rotation_at(within, begins, begin_rows, start, pair, inside, PAIRS, STEP)
        turned = turned + (
            (real_part * cos[None, :] + imag_part * sin[None, :]) * shrink[:, None],
            (imag_part * cos[None, :] - real_part * sin[None, :]) * shrink[:, None],
        )
        cos, sin = rotation_at(within, begins, begin_rows, BLOCK_TOKENS, pair, inside, PAIRS, STEP)
        advance = advance + (cos, sin)
        for byte in tl.static_range(2):
            _, _, factor, offset = affine(step, mean, entry, byte)
            centers = centers + ((offset / tl.where(inside, factor, 1.0)).to(dtype),)
        at = within + offs_n[:, None] * PAIRS + pair[None, :]
        table = table + (tl.load(at, mask=inside[None, :], other=0.0).to(dtype),)
        table = table + (tl.load(at + STEP * PAIRS, mask=inside[None, :], other=0.0).to(dtype),)

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
        rows_at = rows + base * rows_row * ALIGN + place * rows_token * ALIGN

        tiles = ()
        for t in tl.static_range(TILES):
            tile_mask = mask[:, None]
            if t == TILES - 1:
                tile_mask = tile_mask & (t * CHUNK + lane < latent_lanes * ALIGN)[None, :]
            tiles = tiles + (tl.load(rows_at[:, None] + (t * CHUNK + lane)[None, :], mask=tile_mask, other=0),)
        logits = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
        values = ()
        for i in tl.static_range(len(PLANES)):
            for byte in tl.static_range(2):
                tile = field(tiles[PLANES[i][0]], masks[i], byte, PLANES[i][1], WIDE, LOP3)
                logits = tl.dot(queries[2 * i + byte], tl.trans(tile), logits, input_precision="ieee")
                values = values + (tile,)
        tiles = ()
        for t in tl.static_range(ROPE_TILES):
            tile_mask = mask[:, None]
            if t == ROPE_TILES - 1:
                tile_mask = tile_mask & (t * CHUNK + lane < rope_lanes * ALIGN)[None, :]
            tile_at = rows_at[:, None] + (latent_lanes * ALIGN + t * CHUNK + lane)[None, :]
            tiles = tiles + (tl.load(tile_at, mask=tile_mask, other=0),)
        following = ()
        for i in tl.static_range(len(ROPE_PLANES)):
            near = field(tiles[ROPE_PLANES[i][0]], masks[len(PLANES) + i], 0, ROPE_PLANES[i][1], WIDE, LOP3)
            far = field(tiles[ROPE_PLANES[i][0]], masks[len(PLANES) + i], 1, ROPE_PLANES[i][1], WIDE, LOP3)
            near, far = near + centers[2 * i][None, :], far + centers[2 * i + 1][None, :]
            cos_n, sin_n = table[2 * i], table[2 * i + 1]
            turned_near, turned_far = turned[2 * i], turned[2 * i + 1]
            logits = tl.dot(turned_near.to(dtype), tl.trans(near * cos_n - far * sin_n), logits, input_precision="ieee")
            logits = tl.dot(turned_far.to(dtype), tl.trans(near * sin_n + far * cos_n), logits, input_precision="ieee")
            cos_b, sin_b = advance[2 * i][None, :], advance[2 * i + 1][None, :]
            following = following + (turned_near * cos_b + turned_far * sin_b, turned_far * cos_b - turned_near * sin_b)
        turned = following

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
        for i in tl.static_range(2 * len(PLANES)):
            added = added + (tl.dot(weights, values[i], acc[i] * alpha[:, None], input_precision="ieee"),)
        acc = added

    entries += zero
    inverse = 1.0 / tl.where(l_i > 0, l_i, 1.0)
    index = (batch * new_tokens * heads + row) * slots + split
    for i in tl.static_range(len(PLANES)):
        entry = tl.load(entries + i * CHUNK + lane)
        for byte in tl.static_range(2):
            channel, inside, factor, offset = affine(step, mean, entry, byte)
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
        inside = pair < PAIRS
        query_mask, exact_mask = real[:, None] & inside[None, :], mask[:, None] & inside[None, :]
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
