r"""Backward kernels without atomics: one loops over queries for dk and dv, one over keys for dq.

With p = exp(s - ℓ) from the stored ℓ, and δ = rowsum(do ∘ o) - dℓ computed once (FlashAttention-2, Dao, arXiv
2307.08691, algorithm 2, which lacks dℓ, the gradient of the logsumexp):

    dv = pᵀ do      ds = p ∘ (do vᵀ - δ)      dk = scale · dsᵀ q      dq = scale · ds k

One program sums over all query heads of a KV head in a fixed order, so that results are deterministic. The logits are
recomputed in both kernels: 7 matrix products against 2 in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch, capability_of, launches_of, strides
from surgery.kernels.mla_prefill.kernel import shape_of, shared
from surgery.kernels.mla_prefill.reference import prefill_attention
from surgery.kernels.mla_prefill.tiles import interval, key_blocks, load_part, row_limits, store_part
from surgery.kernels.online_softmax import LOG2E
from surgery.kernels.tuned import tuned


@dataclass(frozen=True)
class BackwardConfigs:
    """Configurations of the kernel for keys and values and of the kernel for queries."""

    keys: Config
    queries: Config


def default_configs(itemsize: int, capability: int) -> BackwardConfigs:
    """Return configurations that fit; without spills in 16 bits, for keys of up to 192 and values of 128 elements."""
    if itemsize > 2 or capability < 90:
        small = Config(block_rows=32, block_tokens=32, warps=4, stages=1)
        return BackwardConfigs(small, small)
    return BackwardConfigs(
        keys=Config(block_rows=32, block_tokens=64, warps=8, stages=2),
        queries=Config(block_rows=128, block_tokens=64, warps=8, stages=2),
    )


@launches_of(prefill_attention)
def backward_launches(
    args: SimpleNamespace,
    *,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    delta: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    configs: BackwardConfigs | None = None,
) -> list[Launch]:
    """Return the launches that fill `gradients` of query, key and value, in their shapes.

    Args:
        out, lse: results of the forward pass, contiguous.
        grad_out: [B, T, H, v]; its last stride must be 1, as in query, key, value and their gradients.
        grad_lse: [B, H, T] fp32, contiguous; None for zeros.
        delta: scratch [B, H, T] fp32, contiguous.
    """
    query, key, value = args.query, args.key, args.value
    batch, heads, tokens, _ = query.shape
    kv_heads, positions, value_width = value.shape[1:]
    if configs is None:
        default, shape = default_configs(query.dtype.itemsize, capability_of(query.device)), shape_of(query, key, value)
        configs = BackwardConfigs(
            keys=tuned("mla_prefill_keys", shape, query.device, default.keys),
            queries=tuned("mla_prefill_queries", shape, query.device, default.queries),
        )
    common = shared(args) | strides("batch", "token", "head", grad=grad_out)
    common |= {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse, "delta": delta}
    for name, gradient in zip(("grad_query", "grad_key", "grad_value"), gradients, strict=True):
        common |= {name: gradient, **strides("batch", "head", "token", **{name: gradient})}

    def launch(kernel: Any, axis: tuple[int, int], others: int, config: Config, **more: int) -> Launch:
        grid = (triton.cdiv(*axis), others, batch)
        return Launch.of(kernel, grid, config, common, BLOCK_Q=config.block_rows, **more)

    rows = Config(block_rows=32, warps=4, stages=1)
    of_keys, of_queries = configs.keys, configs.queries
    return [
        launch(delta_kernel, (tokens, rows.block_rows), heads, rows, SIZE=triton.next_power_of_2(value_width)),
        launch(keys_kernel, (positions, of_keys.block_tokens), kv_heads, of_keys, BLOCK_K=of_keys.block_tokens),
        launch(queries_kernel, (tokens, of_queries.block_rows), heads, of_queries, BLOCK_K=of_queries.block_tokens),
    ]


@triton.jit
def delta_kernel(
    grad_out, grad_lse, out, delta, tokens, heads, grad_batch, grad_token, grad_head,
    V: tl.constexpr, SIZE: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Compute δ of BLOCK_Q queries of one head."""
    block = tl.program_id(0).to(tl.int64) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK_Q)
    inside = block + row < tokens
    grad_out += batch * grad_batch + head * grad_head + block * grad_token
    out += ((batch * tokens + block) * heads + head) * V
    grad = load_part(grad_out, grad_token, row, inside, 0, SIZE, V, True).to(tl.float32)
    o = load_part(out, heads * V, row, inside, 0, SIZE, V, True).to(tl.float32)
    place = (batch * heads + head) * tokens + block + row
    result = tl.sum(grad * o, axis=1)
    if grad_lse is not None:
        result -= tl.load(grad_lse + place, mask=inside, other=0.0)
    tl.store(delta + place, result, mask=inside)


@triton.jit
def keys_kernel(
    query, key, value, grad_out, lse, delta, scale,
    starts, lengths, bounds, bounds_size, window, tokens, positions, heads,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    grad_batch, grad_token, grad_head,
    grad_key, grad_value, grad_key_batch, grad_key_head, grad_key_token,
    grad_value_batch, grad_value_head, grad_value_token,
    GROUP: tl.constexpr,
    K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BLOCK_K keys and values of one KV head."""
    block = tl.program_id(0) * BLOCK_K
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    if bounds is not None:
        bounds += batch * positions
    first, behind, offset = row_limits(starts, lengths, batch, tokens, positions)
    row = tl.arange(0, BLOCK_K)
    position = block + row
    key_mask = (position >= first) & (position < behind)
    begin, end = query_range(block, first, behind, offset, window, bounds, bounds_size, tokens, BLOCK_Q, BLOCK_K)

    key += batch * key_batch + kv_head * key_head + tl.cast(block, tl.int64) * key_token
    value += batch * value_batch + kv_head * value_head + tl.cast(block, tl.int64) * value_token
    key0 = load_part(key, key_token, row, key_mask, 0, K0, K, True)
    key1 = key0
    if K1 > 0:
        key1 = load_part(key, key_token, row, key_mask, K0, K1, K, True)
    value0 = load_part(value, value_token, row, key_mask, 0, V0, V, True)
    value1 = value0
    if V1 > 0:
        value1 = load_part(value, value_token, row, key_mask, V0, V1, V, True)
    sum_key0 = tl.zeros([BLOCK_K, K0], tl.float32)
    sum_key1 = tl.zeros([BLOCK_K, K1 if K1 > 0 else 16], tl.float32)
    sum_value0 = tl.zeros([BLOCK_K, V0], tl.float32)
    sum_value1 = tl.zeros([BLOCK_K, V1 if V1 > 0 else 16], tl.float32)

    query += batch * query_batch
    grad_out += batch * grad_batch
    lse += batch * heads * tokens
    delta += batch * heads * tokens
    query_row = tl.arange(0, BLOCK_Q)
    scale2 = scale * LOG2E
    # One loop over the queries of all heads, so that the software pipeline does not drain between heads.
    blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_Q)
    for step in tl.range(0, GROUP * blocks):
        head = kv_head * GROUP + step // blocks
        start = begin + step % blocks * BLOCK_Q
        token = start + query_row
        low, high, asks = interval(offset + token, first, behind, window, bounds)
        asks = asks & (token < tokens)
        queries = query + head * query_head + tl.cast(start, tl.int64) * query_token
        grads = grad_out + head * grad_head + tl.cast(start, tl.int64) * grad_token
        log2 = tl.load(lse + head * tokens + token, mask=asks, other=0.0) * LOG2E
        shift = tl.load(delta + head * tokens + token, mask=asks, other=0.0)

        query0 = load_part(queries, query_token, query_row, asks, 0, K0, K, True)
        logits = tl.dot(key0, tl.trans(query0), input_precision="ieee")
        if K1 > 0:
            query1 = load_part(queries, query_token, query_row, asks, K0, K1, K, True)
            logits = tl.dot(key1, tl.trans(query1), acc=logits, input_precision="ieee")
        mask = (position[:, None] >= low[None, :]) & (position[:, None] < high[None, :]) & asks[None, :]
        weights = tl.where(mask, tl.exp2(logits * scale2 - log2[None, :]), 0.0)

        grad0 = load_part(grads, grad_token, query_row, asks, 0, V0, V, True)
        narrow = weights.to(grad0.dtype)
        sum_value0 = tl.dot(narrow, grad0, acc=sum_value0, input_precision="ieee")
        grad_weights = tl.dot(value0, tl.trans(grad0), input_precision="ieee")
        if V1 > 0:
            grad1 = load_part(grads, grad_token, query_row, asks, V0, V1, V, True)
            sum_value1 = tl.dot(narrow, grad1, acc=sum_value1, input_precision="ieee")
            grad_weights = tl.dot(value1, tl.trans(grad1), acc=grad_weights, input_precision="ieee")
        grad_logits = (weights * (grad_weights - shift[None, :])).to(query0.dtype)
        sum_key0 = tl.dot(grad_logits, query0, acc=sum_key0, input_precision="ieee")
        if K1 > 0:
            sum_key1 = tl.dot(grad_logits, query1, acc=sum_key1, input_precision="ieee")

    inside = position < positions
    grad_key += batch * grad_key_batch + kv_head * grad_key_head + tl.cast(block, tl.int64) * grad_key_token
    grad_value += batch * grad_value_batch + kv_head * grad_value_head + tl.cast(block, tl.int64) * grad_value_token
    store_part(grad_key, grad_key_token, row, inside, sum_key0 * scale, 0, K0, K)
    if K1 > 0:
        store_part(grad_key, grad_key_token, row, inside, sum_key1 * scale, K0, K1, K)
    store_part(grad_value, grad_value_token, row, inside, sum_value0, 0, V0, V)
    if V1 > 0:
        store_part(grad_value, grad_value_token, row, inside, sum_value1, V0, V1, V)


@triton.jit
def query_range(
    block, first, behind, offset, window, bounds, bounds_size, tokens,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return begin (a multiple of BLOCK_Q) and end of the queries that may see one of BLOCK_K keys from `block` on."""
    earliest = tl.maximum(block, first)
    latest = tl.minimum(block + BLOCK_K, behind) - 1  # before `earliest` without keys
    some = latest >= earliest
    high = behind
    if window is not None:
        high = tl.minimum(high, latest + window)
    if bounds is not None:
        high = tl.minimum(high, tl.load(bounds + bounds_size + latest, mask=some, other=0))
    high = tl.where(some, high, 0)
    return tl.maximum(earliest - offset, 0) // BLOCK_Q * BLOCK_Q, tl.minimum(tl.maximum(high - offset, 0), tokens)


@triton.jit
def queries_kernel(
    query, key, value, grad_out, lse, delta, scale,
    starts, lengths, bounds, window, tokens, positions, heads,
    query_batch, query_head, query_token, key_batch, key_head, key_token, value_batch, value_head, value_token,
    grad_batch, grad_token, grad_head,
    grad_query, grad_query_batch, grad_query_head, grad_query_token,
    GROUP: tl.constexpr,
    K: tl.constexpr, K0: tl.constexpr, K1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BLOCK_Q queries of one head."""
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
    begin, _, _, end = key_blocks(low, high, row_mask, positions, BLOCK_K)

    query += batch * query_batch + head * query_head + block * query_token
    grad_out += batch * grad_batch + head * grad_head + block * grad_token
    query0 = load_part(query, query_token, row, row_mask, 0, K0, K, True)
    query1 = query0
    if K1 > 0:
        query1 = load_part(query, query_token, row, row_mask, K0, K1, K, True)
    grad0 = load_part(grad_out, grad_token, row, row_mask, 0, V0, V, True)
    grad1 = grad0
    if V1 > 0:
        grad1 = load_part(grad_out, grad_token, row, row_mask, V0, V1, V, True)
    place = (batch * heads + head) * tokens + token
    log2 = tl.load(lse + place, mask=row_mask, other=0.0) * LOG2E
    shift = tl.load(delta + place, mask=row_mask, other=0.0)
    sum0 = tl.zeros([BLOCK_Q, K0], tl.float32)
    sum1 = tl.zeros([BLOCK_Q, K1 if K1 > 0 else 16], tl.float32)

    key_row = tl.arange(0, BLOCK_K)
    scale2 = scale * LOG2E
    for start in tl.range(begin, end, BLOCK_K):
        position = start + key_row
        key_mask = (position >= first) & (position < behind)
        keys = key + tl.cast(start, tl.int64) * key_token
        values = value + tl.cast(start, tl.int64) * value_token
        key0 = load_part(keys, key_token, key_row, key_mask, 0, K0, K, True)
        logits = tl.dot(query0, tl.trans(key0), input_precision="ieee")
        if K1 > 0:
            key1 = load_part(keys, key_token, key_row, key_mask, K0, K1, K, True)
            logits = tl.dot(query1, tl.trans(key1), acc=logits, input_precision="ieee")
        value0 = load_part(values, value_token, key_row, key_mask, 0, V0, V, True)
        grad_weights = tl.dot(grad0, tl.trans(value0), input_precision="ieee")
        if V1 > 0:
            value1 = load_part(values, value_token, key_row, key_mask, V0, V1, V, True)
            grad_weights = tl.dot(grad1, tl.trans(value1), acc=grad_weights, input_precision="ieee")
        mask = (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        weights = tl.where(mask, tl.exp2(logits * scale2 - log2[:, None]), 0.0)
        grad_logits = (weights * (grad_weights - shift[:, None])).to(key0.dtype)
        sum0 = tl.dot(grad_logits, key0, acc=sum0, input_precision="ieee")
        if K1 > 0:
            sum1 = tl.dot(grad_logits, key1, acc=sum1, input_precision="ieee")

    grad_query += batch * grad_query_batch + head * grad_query_head + block * grad_query_token
    store_part(grad_query, grad_query_token, row, inside, tl.where(row_mask[:, None], sum0 * scale, 0.0), 0, K0, K)
    if K1 > 0:
        store_part(grad_query, grad_query_token, row, inside, tl.where(row_mask[:, None], sum1 * scale, 0.0), K0, K1, K)
