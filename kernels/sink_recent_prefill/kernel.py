r"""Sparse prefill kernel: each block of BLOCK_M queries reads only the key tiles that its head sees.

A block of queries at positions q0 … q1 of a head with `sinks` and `recent` sees two contiguous ranges:

    sinks     start … start + sinks, up to the window
    window    the window of its first query … q1; tiles are aligned to q0, where the diagonal begins

Three kinds of tiles are partly visible: the sinks, the window's left edge, which moves by BLOCK_M over the block's
queries, and the diagonal. A first loop computes them with masks, a second one the tiles between edge and diagonal
without. The window of a full head begins at the row's start: no sinks, and no edge except padding.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch, launches_of, strides
from surgery.kernels.online_softmax import LN2, LOG2E, softmax_step
from surgery.kernels.sink_recent_prefill.reference import sink_recent_attention
from surgery.kernels.tuned import key_of, tuned


def default_config(head_size: int, dtype: torch.dtype) -> Config:
    """Return the default tiling for heads of `head_size` elements; it compiles without spills."""
    if dtype.itemsize > 2:
        return Config(block_rows=32, block_tokens=16, warps=8, stages=2)
    if head_size > 128:
        return Config(block_rows=64, block_tokens=32, warps=8, stages=2)
    return Config(block_rows=128, block_tokens=64, warps=8, stages=2)


@launches_of(sink_recent_attention)
def launches(args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None) -> list[Launch]:
    """Return the launch that fills `out` [B, T, H, v] and `lse` [B, H, T], contiguous.

    `args` are those of `operator.sink_recent_prefill`, each tensor with a contiguous last dimension.
    """
    query, key, value = args.query, args.key, args.value
    rows, heads, tokens, head_size = query.shape
    groups, positions = key.shape[1:3]
    value_size = value.shape[-1]
    if config is None:
        widest = max(head_size, value_size)
        shape = key_of(heads=heads, groups=groups, head_size=widest, dtype=query.dtype)
        config = tuned("sink_recent_prefill", shape, query.device, default_config(widest, query.dtype))
    launch = Launch.of(
        sink_recent_prefill_kernel,
        (rows * heads, triton.cdiv(tokens, config.block_rows)),
        config,
        vars(args),
        out=out,
        lse=lse,
        scale=args.scale * LOG2E.value,
        tokens=tokens,
        positions=positions,
        **strides("row", "head", "token", query=query, key=key, value=value),
        HEADS=heads,
        SIZE=heads // groups,
        D=head_size,
        V=value_size,
        BLOCK_M=config.block_rows,
        BLOCK_N=config.block_tokens,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        BLOCK_V=max(16, triton.next_power_of_2(value_size)),
    )
    return [launch]


@triton.jit(do_not_specialize=["tokens", "positions"])
def sink_recent_prefill_kernel(
    query, key, value, sinks, recent, starts, out, lse, scale, tokens, positions, query_row, query_head, query_token,
    key_row, key_head, key_token, value_row, value_head, value_token,
    HEADS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Attend from BLOCK_M queries of one head."""
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    group = head // SIZE
    row64, head64, group64 = row.to(tl.int64), head.to(tl.int64), group.to(tl.int64)
    # The last queries of a full head see most keys, so they are scheduled first.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    start = 0
    if starts is not None:
        start = tl.load(starts + row)
    many = tl.load(sinks + group)
    width = tl.load(recent + group)
    width = tl.where(width < 0, positions, width)

    # Positions in the sequence.
    first = positions - tokens + block * BLOCK_M
    stop = tl.minimum(first + BLOCK_M, positions)
    edge = tl.minimum(tl.maximum(start, first - width + 1), first)
    inside = tl.maximum(start, stop - width)  # all queries of the block see `inside` … `first`
    inner_tiles = tl.maximum(first - inside, 0) // BLOCK_N
    inner = first - inner_tiles * BLOCK_N
    edge_tiles = tl.cdiv(inner - edge, BLOCK_N)
    window = inner - edge_tiles * BLOCK_N
    sink_stop = tl.minimum(start + many, window)
    sink_tiles = tl.cdiv(tl.maximum(sink_stop - start, 0), BLOCK_N)
    outer_tiles = sink_tiles + edge_tiles + tl.cdiv(stop - first, BLOCK_N)

    line = block * BLOCK_M + tl.arange(0, BLOCK_M)
    own = positions - tokens + line
    number = tl.arange(0, BLOCK_D)
    value_number = tl.arange(0, BLOCK_V)
    q = tl.load(
        query + row64 * query_row + head64 * query_head + line.to(tl.int64)[:, None] * query_token + number[None, :],
        mask=(line < tokens)[:, None] & (number < D)[None, :],
        other=0.0,
    )
    keys = key + row64 * key_row + group64 * key_head + number[None, :]
    values = value + row64 * value_row + group64 * value_head + value_number[None, :]

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for tile in range(0, outer_tiles):
        behind = tile - sink_tiles
        base = tl.where(behind < 0, start + tile * BLOCK_N, window + behind * BLOCK_N)
        base += tl.where(behind < edge_tiles, 0, first - inner)
        place = base + tl.arange(0, BLOCK_N)
        # Padding among the new tokens sees itself.
        key_mask = (place < tl.where(behind < 0, sink_stop, stop)) & (place >= tl.minimum(start, first))
        k = tl.load(
            keys + place.to(tl.int64)[:, None] * key_token, mask=key_mask[:, None] & (number < D)[None, :], other=0.0
        )
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        ahead = own[:, None] - place[None, :]
        near = (ahead < width) | (place - start < many)[None, :]
        mask = key_mask[None, :] & (((ahead >= 0) & (place >= start)[None, :] & near) | (ahead == 0))
        logits = tl.where(mask, logits, -float("inf"))
        weights, m_i, l_i, alpha = softmax_step(logits, m_i, l_i, 1)
        v = tl.load(
            values + place.to(tl.int64)[:, None] * value_token,
            mask=key_mask[:, None] & (value_number < V)[None, :],
            other=0.0,
        )
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    # The first loop included the diagonal, so every query has a visible token.
    for base in range(inner, first, BLOCK_N):
        place = base + tl.arange(0, BLOCK_N)
        k = tl.load(keys + place.to(tl.int64)[:, None] * key_token, mask=(number < D)[None, :], other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        weights, m_i, l_i, alpha = softmax_step(logits, m_i, l_i, 1, SEEN=True)
        v = tl.load(values + place.to(tl.int64)[:, None] * value_token, mask=(value_number < V)[None, :], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    row_mask = line < tokens
    l_i = tl.where(row_mask, l_i, 1.0)
    acc = acc / l_i[:, None]
    result = (row64 * tokens + line) * HEADS + head
    tl.store(
        out + result[:, None] * V + value_number[None, :],
        acc.to(out.dtype.element_ty),
        mask=row_mask[:, None] & (value_number < V)[None, :],
    )
    tl.store(lse + (row64 * HEADS + head) * tokens + line, (m_i + tl.log2(l_i)) * LN2, mask=row_mask)
