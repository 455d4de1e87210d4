"""Split-KV grouped-query attention of a few new tokens over a cache.

One program computes one KV head of one row over one split of the tokens. The rows of its tile are (new token, query
head) pairs of the group, padded to 16 by masks, so that a key is read once for all of them. Logits take one tensor core
instruction per warp: with H / G query heads per key the kernel is bound by memory.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gqa_decode.reference import grouped_query_attention
from surgery.kernels.launch import Config, Launch, launches_of, size, strides
from surgery.kernels.online_softmax import LOG2E, log_of, softmax_step
from surgery.kernels.split_kv import scratch, split_tokens, splits_of, with_merge
from surgery.kernels.tuned import key_of, tuned


def default_config(query: Tensor, key: Tensor, value: Tensor, pages: Tensor | None = None) -> Config:
    """Return the default tiling: about 32 KB of keys and values per iteration, two prefetched; three programs per SM.

    Triton halves the prefetch distance of loads whose addresses are loaded, so pages take five stages instead of three.
    """
    rows = query.shape[1] * (query.shape[2] // key.shape[1])
    wide = max(triton.next_power_of_2(key.shape[-1]), triton.next_power_of_2(value.shape[-1])) * key.dtype.itemsize
    block_rows = min(max(triton.next_power_of_2(rows), 16), 64)
    block_tokens = min(max(16384 // wide, 16), 128)
    return Config(block_rows=block_rows, block_tokens=block_tokens, warps=4, stages=3 if pages is None else 5)


@launches_of(grouped_query_attention, "splits")
def launches(args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None) -> list[Launch]:
    """Return the launches that fill `out` [B, T, H, v] and `lse` [B, T, H] fp32, both contiguous.

    `args` are those of `gqa_decode`, each tensor with a contiguous last dimension.
    """
    query, key, value, pages = args.query, args.key, args.value, args.pages
    rows, tokens, heads, width = query.shape
    groups, slots, v = key.shape[1], key.shape[2], value.shape[-1]
    page, per_group = 0 if pages is None else slots, heads // groups
    capacity = slots if pages is None else slots * pages.shape[1]
    if config is None:
        shape = key_of(tokens=tokens, heads=heads, groups=groups, d=width, v=v, page=page, dtype=query.dtype)
        config = tuned("gqa_decode", shape, query.device, default_config(query, key, value, pages))
    blocks = triton.cdiv(tokens * per_group, config.block_rows)
    splits = args.splits or splits_of(config, rows * groups * blocks, query, capacity, args.window)
    parts, logs = scratch(query, v, splits)
    launch = Launch.of(
        gqa_decode_kernel,
        (blocks * splits, groups, rows),
        config,
        vars(args),
        out=out if parts is None else parts,
        lse=lse if logs is None else logs,
        capacity=size(key, 2) if pages is None else size(pages, 1),
        splits=splits,
        tokens=tokens,
        heads=heads,
        **strides("b", "t", "h", query=query),
        **strides("b", "g", "s", key=key, value=value),
        **strides("b", pages=pages),
        PAGE=page,
        PER_GROUP=per_group,
        D=width,
        V=v,
        BLOCK_M=config.block_rows,
        BLOCK_N=config.block_tokens,
        BLOCK_D=max(triton.next_power_of_2(width), 16),
        BLOCK_V=max(triton.next_power_of_2(v), 16),
    )
    return with_merge(launch, parts, logs, out, lse)


# These grow with the sequence; specialization would recompile the kernel.
@triton.jit(do_not_specialize=["capacity", "splits", "pages_b"])
def gqa_decode_kernel(
    query, key, value, out, lse, lengths, starts, pages, scale, capacity, splits, window, tokens, heads, query_b,
    query_t, query_h, key_b, key_g, key_s, value_b, value_g, value_s, pages_b,
    PAGE: tl.constexpr, PER_GROUP: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend from BLOCK_M (new token, head) pairs of one row and KV head over one split of its tokens."""
    blocks = tl.cdiv(tokens * PER_GROUP, BLOCK_M)
    block = tl.program_id(0) % blocks
    split = tl.program_id(0) // blocks
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)

    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = pair < tokens * PER_GROUP
    time = pair // PER_GROUP
    head = group * PER_GROUP + pair % PER_GROUP
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    if PAGE > 0:
        capacity *= PAGE
    length = row_length(lengths, row, capacity)
    position = length - tokens + time
    low, high = reach(starts, row, length, capacity, window, tokens, block, BLOCK_M, PER_GROUP)
    # Blocks begin at multiples of BLOCK_N, so that each lies within one page if the page size is such a multiple.
    begin, end = split_tokens(low // BLOCK_N * BLOCK_N, high, split, splits, BLOCK_N)

    at = query + row * query_b + time[:, None] * query_t + head[:, None] * query_h + d[None, :]
    q = tl.load(at, mask=row_mask[:, None] & (d < D)[None, :], other=0.0)
    key += group * key_g
    value += group * value_g
    if PAGE == 0:
        key += row * key_b + begin.to(tl.int64) * key_s
        value += row * value_b + begin.to(tl.int64) * value_s
    else:
        pages += row * pages_b

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(begin, end, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        token_mask = (token >= low) & (token < end)
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
            page = tl.load(pages + token // PAGE, mask=token_mask, other=0).to(tl.int64)
            key_at = key + (page * key_b + token % PAGE * key_s)[:, None]
            value_at = value + (page * value_b + token % PAGE * value_s)[:, None]
        k = tl.load(key_at + d[None, :], mask=token_mask[:, None] & (d < D)[None, :], other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        mask = token_mask[None, :] & (token[None, :] <= position[:, None])
        if window is not None:
            mask = mask & (token[None, :] > position[:, None] - window)
        logits = tl.where(mask, logits, -float("inf"))
        weights, m_i, l_i, alpha = softmax_step(logits, m_i, l_i, 1)
        # Masked values must be zero: their weights are 0, but 0 · NaN is NaN.
        mixture = tl.load(value_at + v[None, :], mask=token_mask[:, None] & (v < V)[None, :], other=0.0)
        acc = tl.dot(weights.to(mixture.dtype), mixture, acc * alpha[:, None], input_precision="ieee")

    # This order of terms keeps register use as low as with a constant number of splits.
    place = row * tokens * heads + time * heads + head
    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    out_mask = row_mask[:, None] & (v < V)[None, :]
    tl.store(out + split * V + place[:, None] * (splits * V) + v[None, :], acc.to(out.dtype.element_ty), mask=out_mask)
    tl.store(lse + place * splits + split, log_of(m_i, l_i), mask=row_mask)


@triton.jit
def row_length(lengths, row, capacity):
    """Return the number of tokens of a row: its capacity if `lengths` is None."""
    length = capacity
    if lengths is not None:
        length = tl.load(lengths + row)
    return length


@triton.jit
def reach(starts, row, length, filled, window, tokens, block, BLOCK_M: tl.constexpr, PER_GROUP: tl.constexpr):
    """Return the range [low, high) of the `filled` tokens of a row that are visible to any query of a block."""
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // PER_GROUP, tokens - 1)
    high = tl.minimum(length - tokens + last + 1, filled)
    low = high * 0
    if starts is not None:
        low = tl.maximum(low, tl.load(starts + row))
    if window is not None:
        low = tl.maximum(low, length - tokens + block * BLOCK_M // PER_GROUP - window + 1)
    return low, high
