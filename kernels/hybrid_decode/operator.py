"""Operator `surgery::hybrid_decode`: decode attention over a layer's full and streaming KV heads in one launch."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from surgery.kernels.checks import check_counts, check_dtypes, check_heads, check_keys, check_positive, too_wide
from surgery.kernels.hybrid_decode.reference import hybrid_attention
from surgery.kernels.operation import Operation, attention_outputs


def hybrid_decode(
    query: Tensor,
    full_key: Tensor,
    full_value: Tensor,
    streaming_key: Tensor,
    streaming_value: Tensor,
    scale: float,
    *,
    sink_slots: int,
    sinks: int,
    recent: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Compute attention over Gf full KV heads and Gs streaming ones, which keep sinks and a window (DuoAttention).

    A streaming head's query at position q sees the key at position p ≤ q if q - p < `recent` or p - start < `sinks`; a
    full head's query sees all keys from the row's start to q. A padding query sees only itself, so padding is read only
    among the T new tokens, where it must be finite.

    The K slots of a streaming head are `sink_slots` sinks, then the tokens of the last K - `sink_slots` positions, the
    new ones last. Sink slot j belongs to position start + j and is empty until that position has left the window. So
    `lengths` and `starts` determine the visible tokens; one new token without padding sees all slots.

    A compensated head (RazorAttention, arXiv:2407.15891) is a streaming head whose result is merged, by
    `split_kv.merge`, with the mean key k̄ and value v̄ of its N dropped tokens: out v̄, lse scale · q · k̄ + log N.
    Quantized heads must be dequantized first.

    Args:
        query: [B, T, H, d], those of full heads first; each KV head has H / (Gf + Gs) consecutive query heads.
        full_key, full_value: [B, Gf, S, d] and [B, Gf, S, v], the T new tokens the last within `lengths`. Without full
            heads [B, 0, S, d].
        streaming_key, streaming_value: [B, Gs, K, d] and [B, Gs, K, v].
        scale: multiplies the logits.
        sink_slots: leading slots that are reserved for sinks; 0 while no token has left the window.
        sinks, recent: first and latest tokens that a query of a streaming head sees, itself included.
        lengths: tokens of each row, padding and the new ones included, int32 [B]; None for S.
        starts: the first token of each row that is no padding, int32 [B]; None for 0.
        splits: programs that share the tokens of a full head; None to choose by shapes.

    Returns:
        out [B, T, H, v] in the query's dtype and lse [B, T, H] in fp32 (float64 for float64 inputs), 0 and -∞ for a
        query before its row's first token.

    Raises:
        ValueError: inconsistent shapes or dtypes.
    """
    # Checked here and not in the plan, since the slots of a filling window change at every step.
    slots = streaming_key.shape[-2]
    if not 0 <= sink_slots <= min(sinks, slots):
        raise ValueError(f"hybrid_decode: sink_slots must be from 0 to {min(sinks, slots)}, not {sink_slots}")
    if streaming_key.shape[1] and slots - sink_slots < query.shape[1]:
        raise ValueError(f"hybrid_decode: {query.shape[1]} new tokens exceed {slots - sink_slots} window slots")
    tensors = (query, full_key, full_value, streaming_key, streaming_value)
    return _hybrid_decode(*tensors, scale, sink_slots, sinks, recent, lengths, starts, splits)


CACHED = ("full_key", "full_value", "streaming_key", "streaming_value")


def _cached(call: SimpleNamespace) -> list[Tensor]:
    return [getattr(call, name) for name in CACHED]


def _check(call: SimpleNamespace) -> None:
    query = call.query
    full_key, full_value, streaming_key, streaming_value = _cached(call)
    name, groups = "hybrid_decode", full_key.shape[1] + streaming_key.shape[1]
    for key, value in ((full_key, full_value), (streaming_key, streaming_value)):
        check_keys(name, query, key, value)
        if len(query) != len(key):
            raise ValueError(f"{name}: batch size is {len(query)} for queries, {len(key)} for keys")
    check_heads(name, query.shape[2], groups)
    check_dtypes(name, query=query, **dict(zip(CACHED, _cached(call), strict=True)))
    check_counts(name, len(query), lengths=call.lengths, starts=call.starts)
    check_positive(name, splits=call.splits)
    if full_value.shape[-1] != streaming_value.shape[-1]:
        widths = f"{full_value.shape[-1]} and {streaming_value.shape[-1]}"
        raise ValueError(f"{name}: full_value and streaming_value must have the same head size, not {widths}")
    if call.sinks < 0 or call.recent < 1:
        raise ValueError(f"{name}: sinks must be at least 0 and recent at least 1, not {call.sinks} and {call.recent}")


_hybrid_decode = Operation(
    "hybrid_decode",
    hybrid_attention,
    lambda call: attention_outputs(call.query, call.full_value.shape[-1]),
    lambda call: too_wide(call.query, call.full_value),
    _check,
    settings=("splits",),
    growth=({"full_key": 2, "full_value": 2}, {"streaming_key": 2, "streaming_value": 2}),
    free=("sink_slots",),
)
