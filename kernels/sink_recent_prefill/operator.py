"""Operator `surgery::sink_recent_prefill`: prefill attention with sinks and a window per KV head."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from surgery.kernels.checks import check_counts, check_dtypes, check_heads, check_keys, too_wide
from surgery.kernels.operation import Operation, attention_outputs
from surgery.kernels.sink_recent_prefill.reference import sink_recent_attention


def sink_recent_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sinks: Tensor,
    recent: Tensor,
    *,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention over each KV head's sinks and window (DuoAttention, arXiv:2410.10819), or all tokens.

    The query at position q sees the key at position p, start ≤ p ≤ q, if q - p < `recent` or p - start < `sinks` of its
    head; tiles of keys that no query of a block sees are never read. Query t is at position S - T + t. A padding query
    sees only itself, so its result is its own value; padding is read only among the last T tokens, where it must be
    finite.

    Args:
        query: [B, H, T, d].
        key, value: [B, G, S, d] and [B, G, S, v], S ≥ T, of all tokens of the sequence.
        scale: multiplies the logits.
        sinks, recent: int32 [G], by KV head; `recent` ≥ 1, or negative for all tokens. Not read on the host.
        starts: the first token of each row that is no padding, int32 [B]; None for 0.

    Returns:
        out [B, T, H, v] in the query's dtype and lse [B, H, T] in fp32 (float64 for float64 inputs).

    Raises:
        ValueError: inconsistent shapes or dtypes.
    """
    return _sink_recent_prefill(query, key, value, scale, sinks, recent, starts)


def _check(call: SimpleNamespace) -> None:
    query, key = call.query, call.key
    name = "sink_recent_prefill"
    check_keys(name, query, key, call.value)
    check_heads(name, query.shape[1], key.shape[1])
    check_dtypes(name, query=query, key=key, value=call.value)
    if len(query) != len(key):
        raise ValueError(f"{name}: batch size is {len(query)} for queries, {len(key)} for keys")
    if query.shape[2] > key.shape[2]:
        raise ValueError(f"{name}: {query.shape[2]} queries need at least as many keys, not {key.shape[2]}")
    check_counts(name, key.shape[1], sinks=call.sinks, recent=call.recent)
    check_counts(name, len(query), starts=call.starts)


def _outputs(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    out, lse = attention_outputs(call.query.transpose(1, 2), call.value.shape[-1])
    return out, lse.new_empty(call.query.shape[:3])


_sink_recent_prefill = Operation(
    "sink_recent_prefill",
    sink_recent_attention,
    _outputs,
    lambda call: too_wide(call.query, call.value),
    _check,
)
