r"""Forward kernel: one program computes a block of queries of one head over the keys that they see.

FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1): the softmax is computed online in fp32 with exp2, the scale and
log2 e folded into the logits. Keys of 128 + 64 elements are not padded to 256: a row is two power-of-two tiles
(`tiles.parts_of`), the logits are the sum of two products, and values of such widths have two accumulators.

Each query sees one interval of positions (`tiles.interval`). Keys that all queries of the block see need no mask; only
blocks at the ends of the intervals are masked. Late queries, which see most keys, are scheduled first.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch, capability_of, launches_of, strides
from surgery.kernels.mla_prefill.reference import prefill_attention
from surgery.kernels.mla_prefill.tiles import interval, key_blocks, load_part, parts_of, row_limits, store_part
from surgery.kernels.online_softmax import LOG2E, log_of
from surgery.kernels.tuned import key_of, tuned


def default_config(itemsize: int, capability: int) -> Config:
    """Return a configuration that fits; without spills in 16 bits for 192 key and 128 value elements (Triton 3.9).

    Args:
        itemsize: bytes per element.
        capability: 80 keeps queries in registers, which a block of 64 fills; 90 reads them from shared memory.
    """
    if itemsize > 2:
        return Config(block_rows=32, block_tokens=32, warps=4, stages=1)
    if capability < 90:
        return Config(block_rows=64, block_tokens=32, warps=4, stages=2)
    return Config(block_rows=128, block_tokens=64, warps=8, stages=2)


def shape_of(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Return the shape key of tuned configurations."""
    widths = {"key": query.shape[-1], "value": value.shape[-1]}
    return key_of(heads=query.shape[1], kv_heads=key.shape[1], **widths, dtype=query.dtype)


def shared(args: SimpleNamespace) -> dict:
    """Return kernel arguments shared by the forward and backward pass: visibility, sizes and strides."""
    query, key, value = args.query, args.key, args.value
    return {
        **vars(args),
        "bounds_size": 0 if args.bounds is None else args.bounds[0].numel(),
        "tokens": query.shape[2],
        "positions": key.shape[2],
        "heads": query.shape[1],
        **strides("batch", "head", "token", query=query, key=key, value=value),
        "GROUP": query.shape[1] // key.shape[1],
        **dict(zip(("K", "K0", "K1"), (query.shape[-1], *parts_of(query.shape[-1])), strict=True)),
        **dict(zip(("V", "V0", "V1"), (value.shape[-1], *parts_of(value.shape[-1])), strict=True)),
    }


@launches_of(prefill_attention)
def launches(args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None) -> list[Launch]:
    """Return the launch that fills `out` [B, T, H, v] and `lse` [B, H, T] fp32, contiguous; see `operator.mla_prefill`.

    The last strides of query, key and value must be 1.
    """
    query, key, value = args.query, args.key, args.value
    batch, heads, tokens, _ = query.shape
    if config is None:
        default = default_config(query.dtype.itemsize, capability_of(query.device))
        config = tuned("mla_prefill", shape_of(query, key, value), query.device, default)
    grid = (triton.cdiv(tokens, config.block_rows), heads, batch)
    options = {"out": out, "lse": lse, "BLOCK_Q": config.block_rows, "BLOCK_K": config.block_tokens}
    return [Launch.of(forward_kernel, grid, config, shared(args), **options)]


@triton.jit
def forward_kernel(
    query, key, value, out, lse, scale, starts, lengths, bounds, window, tokens, positions, heads,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    GROUP: tl.constexpr, K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend from BLOCK_Q queries of one head."""
    block = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    key += batch * key_batch + head // GROUP * key_head
    value += batch * value_batch + head // GROUP * value_head
    if bounds is not None:
        bounds += batch * positions
    first, behind, offset = row_limits(starts, lengths, batch, tokens, positions)

    row = tl.arange(0, BLOCK_Q)
    token = block.to(tl.int32) + row
    inside = token < tokens
    low, high, row_mask = interval(offset + token, first, behind, window, bounds)
    row_mask = row_mask & inside
    begin, full_begin, full_end, end = key_blocks(low, high, row_mask, positions, BLOCK_K)

    query += batch * query_batch + head * query_head + block * query_token
    query0 = load_part(query, query_token, row, row_mask, 0, K0, K, True)
    query1 = query0
    if K1 > 0:
        query1 = load_part(query, query_token, row, row_mask, K0, K1, K, True)
    scale2 = scale * LOG2E
    m_i = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    acc0 = tl.zeros([BLOCK_Q, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_Q, V1 if V1 > 0 else 16], tl.float32)

    # Leading blocks need a mask only with a window, padding or documents.
    if window is not None or starts is not None or bounds is not None:
        acc0, acc1, m_i, l_i = attend(
            acc0, acc1, m_i, l_i, query0, query1, key, value, key_token, value_token,
            begin, tl.minimum(full_begin, end), first, behind, low, high, scale2,
            K, K0, K1, V, V0, V1, BLOCK_K, True,
        )  # fmt: skip
    acc0, acc1, m_i, l_i = attend(
        acc0, acc1, m_i, l_i, query0, query1, key, value, key_token, value_token,
        full_begin, full_end, first, behind, low, high, scale2,
        K, K0, K1, V, V0, V1, BLOCK_K, False,
    )  # fmt: skip
    acc0, acc1, m_i, l_i = attend(
        acc0, acc1, m_i, l_i, query0, query1, key, value, key_token, value_token,
        full_end, end, first, behind, low, high, scale2,
        K, K0, K1, V, V0, V1, BLOCK_K, True,
    )  # fmt: skip

    l_i = tl.where(row_mask, l_i, 0.0)
    share = tl.where(l_i > 0, 1.0 / tl.where(l_i > 0, l_i, 1.0), 0.0)
    tl.store(lse + (batch * heads + head) * tokens + token, log_of(m_i, l_i), mask=inside)
    out += (batch * tokens + block) * heads * V + head * V
    store_part(out, heads * V, row, inside, acc0 * share[:, None], 0, V0, V)
    if V1 > 0:
        store_part(out, heads * V, row, inside, acc1 * share[:, None], V0, V1, V)


@triton.jit
def attend(
    acc0, acc1, m_i, l_i, query0, query1, key, value, key_token, value_token,
    begin, end, first, behind, low, high, scale2,
    K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_K: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Update the online softmax and accumulators with keys `begin` to `end`; without MASK all queries see all keys."""
    row = tl.arange(0, BLOCK_K)
    for start in tl.range(begin, end, BLOCK_K):
        position = start + row
        key_mask = (position >= first) & (position < behind)
        keys = key + tl.cast(start, tl.int64) * key_token
        values = value + tl.cast(start, tl.int64) * value_token
        logits = tl.dot(
            query0, tl.trans(load_part(keys, key_token, row, key_mask, 0, K0, K, MASK)), input_precision="ieee"
        )
        if K1 > 0:
            part = load_part(keys, key_token, row, key_mask, K0, K1, K, MASK)
            logits = tl.dot(query1, tl.trans(part), acc=logits, input_precision="ieee")
        if MASK:
            mask = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
            logits = tl.where(mask, logits, -float("inf"))
        new = tl.maximum(m_i, tl.max(logits, axis=1) * scale2)
        # -∞ - -∞ is NaN for a query without a visible token so far.
        least = tl.where(new == -float("inf"), 0.0, new) if MASK else new
        weights = tl.exp2(logits * scale2 - least[:, None])
        alpha = tl.exp2(m_i - least)
        l_i = l_i * alpha + tl.sum(weights, axis=1)
        m_i = new
        weights = weights.to(value.dtype.element_ty)
        acc0 = acc0 * alpha[:, None]
        acc0 = tl.dot(
            weights, load_part(values, value_token, row, key_mask, 0, V0, V, MASK), acc=acc0, input_precision="ieee"
        )
        if V1 > 0:
            part = load_part(values, value_token, row, key_mask, V0, V1, V, MASK)
            acc1 = tl.dot(weights, part, acc=acc1 * alpha[:, None], input_precision="ieee")
    return acc0, acc1, m_i, l_i
