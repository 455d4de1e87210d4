r"""One launch over the full and the streaming KV heads of a layer; streaming heads keep sinks and a window.

The grid is a list of work items that follows from shapes alone: first B · Gf · splits items of full heads, the long
ones, then B · Gs items of streaming heads, one each, which fill the multiprocessors that become free. An item is a
range of slots with their positions in the sequence; all items run the same loop:

    full head, split s        the s-th split of the tokens from the row's start to its length
    streaming head            all slots: slot j < `sink_slots` is at position start + j, a later slot j at
                              length - (slots - j)

A second launch merges the partial results of full heads if there are several splits; streaming heads write their
output directly. The query heads of a KV head, of all new tokens, are the rows of one product, so that a key is read
once.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.hybrid_decode.reference import hybrid_attention
from surgery.kernels.launch import Config, Launch, launches_of, size, strides
from surgery.kernels.online_softmax import LOG2E, log_of, softmax_step
from surgery.kernels.split_kv import merge_kernel, scratch, split_tokens, splits_of, with_merge
from surgery.kernels.tuned import key_of, tuned

ALL = tl.constexpr(1 << 30)
"""Window size that stands for no window."""


def default_config(rows: int, head_size: int, dtype: torch.dtype) -> Config:
    """Return the default tiling for `rows` query rows of a KV head (heads × new tokens); it compiles without spills."""
    block_rows = max(16, min(64, triton.next_power_of_2(rows)))
    if dtype.itemsize > 2:
        return Config(min(block_rows, 32), block_tokens=32, warps=8, stages=2)
    wide = head_size > 128
    return Config(block_rows, block_tokens=32 if wide else 64, warps=4, stages=2 if wide else 3)


@launches_of(hybrid_attention, "splits")
def launches(args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None) -> list[Launch]:
    """Return the launches that fill `out` [B, T, H, v] and `lse` [B, T, H], both contiguous.

    `args` are those of `operator.hybrid_decode`, each tensor with a contiguous last dimension.
    """
    query, full_key, full_value = args.query, args.full_key, args.full_value
    rows, tokens, heads, head_size = query.shape
    full, streaming = full_key.shape[1], args.streaming_key.shape[1]
    per_head = heads // (full + streaming)
    value_size = full_value.shape[-1]
    if config is None:
        shape = key_of(heads=heads, full=full, streaming=streaming, head_size=head_size, dtype=query.dtype)
        config = tuned("hybrid_decode", shape, query.device, default_config(tokens * per_head, head_size, query.dtype))
    blocks = triton.cdiv(tokens * per_head, config.block_rows)
    splits = args.splits or splits_of(config, rows * full * blocks, query, full_key.shape[2])
    parts, logs = scratch(query[:, :, : full * per_head], value_size, splits)
    attention = Launch.of(
        hybrid_decode_kernel,
        (blocks * rows * (full * splits + streaming),),
        config,
        vars(args),
        out=out,
        lse=lse,
        parts=parts,
        logs=logs,
        scale=args.scale * LOG2E.value,
        rows=rows,
        tokens=tokens,
        capacity=size(full_key, 2),
        slots=size(args.streaming_key, 2),
        splits=splits,
        **strides("row", "token", "head", query=query),
        **strides("row", "head", "token", full_key=full_key, full_value=full_value),
        **strides("row", "head", "token", streaming_key=args.streaming_key, streaming_value=args.streaming_value),
        FULL=full,
        STREAMING=streaming,
        SIZE=per_head,
        D=head_size,
        V=value_size,
        ONE_TOKEN=tokens == 1,
        BLOCK_M=config.block_rows,
        BLOCK_N=config.block_tokens,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        BLOCK_V=max(16, triton.next_power_of_2(value_size)),
    )
    if splits == 1 or not full:
        return [attention]
    attention, merged = with_merge(attention, parts, logs, out, lse)
    head_counts = {"full_queries": full * per_head, "other_queries": streaming * per_head}
    return [attention, replace(merged, kernel=merge_full_kernel, arguments=merged.arguments | head_counts)]


# These only bound loops and masks and grow with the sequence; specialization would recompile the kernel.
@triton.jit(do_not_specialize=["rows", "tokens", "capacity", "slots", "splits", "sink_slots", "sinks", "recent"])
def hybrid_decode_kernel(
    query, full_key, full_value, streaming_key, streaming_value, lengths, starts, out, lse, parts, logs, scale, rows,
    tokens, capacity, slots, splits, sink_slots, sinks, recent, query_row, query_token, query_head, full_key_row,
    full_key_head, full_key_token, full_value_row, full_value_head, full_value_token, streaming_key_row,
    streaming_key_head, streaming_key_token, streaming_value_row, streaming_value_head, streaming_value_token,
    FULL: tl.constexpr, STREAMING: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    ONE_TOKEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend from BLOCK_M query rows of one KV head over a range of its tokens."""
    blocks = tl.cdiv(tokens * SIZE, BLOCK_M)
    item = tl.program_id(0) // blocks
    full_items = rows * FULL * splits
    is_full = item < full_items
    streaming_item = item - full_items
    row = tl.where(is_full, item // (max(FULL, 1) * splits), streaming_item // max(STREAMING, 1))
    row64 = row.to(tl.int64)
    length = capacity
    if lengths is not None:
        length = tl.load(lengths + row)
    start = 0
    if starts is not None:
        start = tl.load(starts + row)
    # Padding among the new tokens sees itself.
    low = tl.maximum(tl.minimum(start, length - tokens), 0)

    if is_full:
        split = item % splits
        group = (item // splits) % max(FULL, 1)
        keys = full_key + row64 * full_key_row + group.to(tl.int64) * full_key_head
        values = full_value + row64 * full_value_row + group.to(tl.int64) * full_value_head
        key_token = full_key_token
        value_token = full_value_token
        first, stop = split_tokens(low, length, split, splits, BLOCK_N)
        num_sinks = 0
        shift = 0
        many = 0
        width = ALL
    else:
        split = item * 0
        local = streaming_item % max(STREAMING, 1)
        group = local + FULL
        keys = streaming_key + row64 * streaming_key_row + local.to(tl.int64) * streaming_key_head
        values = streaming_value + row64 * streaming_value_row + local.to(tl.int64) * streaming_value_head
        key_token = streaming_key_token
        value_token = streaming_value_token
        first = item * 0
        stop = slots
        num_sinks = sink_slots
        shift = length - slots
        many = sinks
        width = recent

    line = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    line_token = line // SIZE
    head = group * SIZE + line % SIZE
    number = tl.arange(0, BLOCK_D)
    value_number = tl.arange(0, BLOCK_V)
    offset = line_token.to(tl.int64) * query_token + head.to(tl.int64) * query_head
    q = tl.load(
        query + row64 * query_row + offset[:, None] + number[None, :],
        mask=(line_token < tokens)[:, None] & (number < D)[None, :],
        other=0.0,
    )
    # With one new token all rows have one mask.
    own = (length - 1) + tl.zeros([1, 1], tl.int32) if ONE_TOKEN else (length - tokens + line_token)[:, None]

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for base in range(first, stop, BLOCK_N):
        slot = base + tl.arange(0, BLOCK_N)
        is_sink = slot < num_sinks
        position = tl.where(is_sink, start + slot, slot + shift)
        # A sink slot is empty until its token has left the window.
        slot_mask = (slot < stop) & (position >= low) & (~is_sink | (position < shift + num_sinks))
        key = tl.load(
            keys + slot.to(tl.int64)[:, None] * key_token + number[None, :],
            mask=slot_mask[:, None] & (number < D)[None, :],
            other=0.0,
        )
        logits = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        ahead = own - position[None, :]
        near = (ahead < width) | (position - start < many)[None, :]
        mask = slot_mask[None, :] & (((ahead >= 0) & (position >= start)[None, :] & near) | (ahead == 0))
        logits = tl.where(mask, logits, -float("inf"))
        weights, m_i, l_i, alpha = softmax_step(logits, m_i, l_i, 1)
        value = tl.load(
            values + slot.to(tl.int64)[:, None] * value_token + value_number[None, :],
            mask=slot_mask[:, None] & (value_number < V)[None, :],
            other=0.0,
        )
        acc = tl.dot(weights.to(value.dtype), value, acc * alpha[:, None], input_precision="ieee")

    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    log = log_of(m_i, l_i)
    row_mask = line_token < tokens
    slot_mask = row_mask[:, None] & (value_number < V)[None, :]
    token_row = row64 * tokens + line_token
    if parts is not None and is_full:
        part = (token_row * (FULL * SIZE) + head) * splits + split
        tl.store(parts + part[:, None] * V + value_number[None, :], acc, mask=slot_mask)
        tl.store(logs + part, log, mask=row_mask)
    else:
        result = token_row * ((FULL + STREAMING) * SIZE) + head
        tl.store(out + result[:, None] * V + value_number[None, :], acc.to(out.dtype.element_ty), mask=slot_mask)
        tl.store(lse + result, log, mask=row_mask)


@triton.jit
def merge_full_kernel(
    parts, logs, out, log, width, full_queries, other_queries,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Run `split_kv.merge_kernel` on outputs in which each token's streaming query heads follow the merged ones."""
    between = (tl.program_id(0) // full_queries).to(tl.int64) * other_queries
    merge_kernel(parts, logs, out + between * width, log + between, width, SPLITS, BLOCK_S, BLOCK_D)
