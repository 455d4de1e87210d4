"""Grouped-query attention of a few new tokens over a cache, its tokens dealt out to several programs.

One program has one KV head of one row and some of its tokens. The rows of its tile are pairs of a new token and a query
head of the group, padded to 16 by masks, so that one read of a key serves all that look at it. Scores are products of
one tensor core instruction a warp: at H / G query heads a key the memory decides the speed, not they.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch
from surgery.kernels.split_kv import LN2, LOG2E, merge_launch, processors, split_count, split_tokens

WIDEST = 1024
"""Bytes of a token's key or value, padded to a power of two, that a tile takes."""


def default_config(query: Tensor, key: Tensor, value: Tensor, pages: Tensor | None = None) -> Config:
    """About 32 KB of keys and values a step, two of them under way; three such programs fit into a multiprocessor.

    Triton halves the distance of loads whose address is loaded, so pages take five stages for the same two.
    """
    rows = query.shape[1] * (query.shape[2] // key.shape[1])
    wide = max(triton.next_power_of_2(key.shape[-1]), triton.next_power_of_2(value.shape[-1])) * key.dtype.itemsize
    block_rows = min(max(triton.next_power_of_2(rows), 16), 64)
    block_tokens = min(max(16384 // wide, 16), 128)
    return Config(block_rows=block_rows, block_tokens=block_tokens, warps=4, stages=3 if pages is None else 5)


def default_splits(query: Tensor, groups: int, capacity: int, window: int | None, config: Config) -> int:
    """Splits of each row's tokens, from shapes alone."""
    if config.splits is not None:
        return config.splits
    rows, tokens, heads, _ = query.shape
    programs = rows * groups * triton.cdiv(tokens * heads // groups, config.block_rows)
    reach = capacity if window is None else min(capacity, window + tokens - 1)
    return split_count(programs, reach, processors(query.device))


def scratch(query: Tensor, width: int, splits: int) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the parts of the splits: [B, T, H, splits, v] and [B, T, H, splits] fp32; None for one split."""
    if splits == 1:
        return None, None
    shape = (*query.shape[:3], splits)
    return query.new_empty((*shape, width), dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


def launches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    parts: Tensor | None = None,
    logs: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
    window: int | None = None,
    config: Config,
) -> list[Launch]:
    """The launches that fill `out` and `lse`; the tensors may be on the meta device.

    Args:
        query, key, value, scale, lengths, starts, pages, window: as of `gqa_decode`; the last dimension contiguous.
        out: [B, T, H, v], contiguous.
        lse: [B, T, H] fp32, contiguous.
        parts, logs: of `scratch`; their number of splits is that of the launch.
        config: block_rows, block_tokens, warps and stages are used.
    """
    rows, tokens, heads, width = query.shape
    groups, slots = key.shape[1], key.shape[2]
    per_group = heads // groups
    splits = 1 if parts is None else parts.shape[3]
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "out": out if parts is None else parts,
        "lse": lse if logs is None else logs,
        "lengths": lengths,
        "starts": starts,
        "pages": pages,
        "scale": scale,
        "capacity": slots if pages is None else slots * pages.shape[1],
        "window": window,
        "tokens": tokens,
        "heads": heads,
        "query_b": query.stride(0),
        "query_t": query.stride(1),
        "query_h": query.stride(2),
        "key_b": key.stride(0),
        "key_g": key.stride(1),
        "key_s": key.stride(2),
        "value_b": value.stride(0),
        "value_g": value.stride(1),
        "value_s": value.stride(2),
        "pages_b": 0 if pages is None else pages.stride(0),
        "PAGE": 0 if pages is None else slots,
        "SPLITS": splits,
        "PER_GROUP": per_group,
        "D": width,
        "V": value.shape[-1],
        "BLOCK_M": config.block_rows,
        "BLOCK_N": config.block_tokens,
        "BLOCK_D": max(triton.next_power_of_2(width), 16),
        "BLOCK_V": max(triton.next_power_of_2(value.shape[-1]), 16),
    }
    grid = (triton.cdiv(tokens * per_group, config.block_rows) * splits, groups, rows)
    done = [Launch(gqa_decode_kernel, grid, arguments, warps=config.warps, stages=config.stages)]
    if parts is not None:
        done.append(merge_launch(parts.flatten(0, 2), logs.flatten(0, 2), out.flatten(0, 2), lse.flatten()))
    return done


@triton.jit
def gqa_decode_kernel(
    query,
    key,
    value,
    out,
    lse,
    lengths,
    starts,
    pages,
    scale,
    capacity,
    window,
    tokens,
    heads,
    query_b,
    query_t,
    query_h,
    key_b,
    key_g,
    key_s,
    value_b,
    value_g,
    value_s,
    pages_b,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: one row, one KV head, BLOCK_M pairs of a new token and a head, one split of the tokens."""
    blocks = tl.cdiv(tokens * PER_GROUP, BLOCK_M)
    block = tl.program_id(0) % blocks
    split = tl.program_id(0) // blocks
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)

    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    there = pair < tokens * PER_GROUP
    time = pair // PER_GROUP
    head = group * PER_GROUP + pair % PER_GROUP
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    length = row_length(lengths, row, capacity)
    position = length - tokens + time
    low, high = reach(starts, row, length, capacity, window, tokens, block, BLOCK_M, PER_GROUP)
    # Blocks begin at multiples of BLOCK_N, so that one lies in one page where pages are such multiples.
    begin, end = split_tokens(low // BLOCK_N * BLOCK_N, high, split, SPLITS, BLOCK_N)

    at = query + row * query_b + time[:, None] * query_t + head[:, None] * query_h + d[None, :]
    q = tl.load(at, mask=there[:, None] & (d < D)[None, :], other=0.0)
    key += group * key_g
    value += group * value_g
    if PAGE == 0:
        key += row * key_b + begin.to(tl.int64) * key_s
        value += row * value_b + begin.to(tl.int64) * value_s
    else:
        pages += row * pages_b

    most = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(begin, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        held = (token >= low) & (token < end)
        if PAGE == 0:
            key_at = key + (tl.arange(0, BLOCK_N) * key_s)[:, None]
            value_at = value + (tl.arange(0, BLOCK_N) * value_s)[:, None]
            key += BLOCK_N * key_s
            value += BLOCK_N * value_s
        elif PAGE % BLOCK_N == 0:
            page = tl.load(pages + first // PAGE).to(tl.int64)
            slot = first % PAGE + tl.arange(0, BLOCK_N)
            key_at = key + page * key_b + (slot * key_s)[:, None]
            value_at = value + page * value_b + (slot * value_s)[:, None]
        else:
            page = tl.load(pages + token // PAGE, mask=held, other=0).to(tl.int64)
            key_at = key + (page * key_b + token % PAGE * key_s)[:, None]
            value_at = value + (page * value_b + token % PAGE * value_s)[:, None]
        k = tl.load(key_at + d[None, :], mask=held[:, None] & (d < D)[None, :], other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        seen = held[None, :] & (token[None, :] <= position[:, None])
        if window is not None:
            seen = seen & (token[None, :] > position[:, None] - window)
        logits = tl.where(seen, logits, -float("inf"))

        now = tl.maximum(most, tl.max(logits, axis=1))
        base = tl.where(now == -float("inf"), 0.0, now)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, axis=1)
        most = now
        # Zeros where nothing is held: weights there are 0, but 0 · NaN is not.
        mixture = tl.load(value_at + v[None, :], mask=held[:, None] & (v < V)[None, :], other=0.0)
        mixed = tl.dot(weights.to(mixture.dtype), mixture, mixed * shrink[:, None], input_precision="ieee")

    place = ((row * tokens + time) * heads + head) * SPLITS + split
    some = tl.where(total > 0, total, 1.0)
    mixed = mixed / some[:, None]
    tl.store(
        out + place[:, None] * V + v[None, :],
        mixed.to(out.dtype.element_ty),
        mask=there[:, None] & (v < V)[None, :],
    )
    tl.store(lse + place, tl.where(total > 0, (most + tl.log2(some)) * LN2, -float("inf")), mask=there)


@triton.jit
def row_length(lengths, row, capacity):
    """Tokens of a row; all that there is room for where no lengths are given."""
    length = capacity
    if lengths is not None:
        length = tl.load(lengths + row)
    return length


@triton.jit
def reach(starts, row, length, held, window, tokens, block, BLOCK_M: tl.constexpr, PER_GROUP: tl.constexpr):
    """First and behind-the-last of the `held` tokens of a row that any pair of a block of rows sees."""
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // PER_GROUP, tokens - 1)
    high = tl.minimum(length - tokens + last + 1, held)
    low = high * 0
    if starts is not None:
        low = tl.maximum(low, tl.load(starts + row))
    if window is not None:
        low = tl.maximum(low, length - tokens + block * BLOCK_M // PER_GROUP - window + 1)
    return low, high
