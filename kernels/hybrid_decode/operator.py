"""`hybrid_decode`: attention of new tokens over a layer's full and streaming KV heads at once."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.backend import refusal, tell_once
from surgery.kernels.hybrid_decode.reference import hybrid_attention
from surgery.kernels.reference_gradient import differentiate_by
from surgery.kernels.tuned import key_of, tuned

WIDEST = 256
"""Numbers of a key or value that one tile can hold."""


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
    r"""Attention where the first Gf KV heads keep all tokens and the other Gs sinks and a window (DuoAttention).

    A streaming head's query at place q sees the key at place p ≤ q if q - p < `recent` or p - start < `sinks`, a full
    head's all from the row's start on. A query that is padding sees itself alone, so of padding only what is among the
    T new tokens is read, and must be finite.

    A streaming head's slots are what sinks and window are cached as: `sink_slots` sinks, slot j being that of place
    start + j and empty until that place has left the window, then the tokens of the last K - `sink_slots` places, the
    new ones last. So `lengths` and `starts` say what each query sees; of one new token without padding it is all.

    A compensated head (RazorAttention, arXiv:2407.15891) is a streaming head whose result is merged, by
    `split_kv.merge`, with that of its mean key k̄ and value v̄ of N dropped tokens: out v̄, lse scale · q · k̄ + log N.
    Quantised heads have to be decoded before.

    Args:
        query: [B, T, H, d], those of full heads first; H / (Gf + Gs) query heads in a row follow each KV head.
        full_key, full_value: [B, Gf, S, d] and [B, Gf, S, v], the T new tokens the last within `lengths`. Without full
            heads [B, 0, S, d].
        streaming_key, streaming_value: [B, Gs, K, d] and [B, Gs, K, v].
        scale: multiplies the logits.
        sink_slots: of the K slots the first ones, which are for sinks; 0 while no token has left the window.
        sinks, recent: the first and last tokens that a query of a streaming head sees, itself included.
        lengths: tokens of each row that have come, padding and the new ones included, int32 [B]; None is S.
        starts: the first token of each row that is no padding, int32 [B]; None is 0.
        splits: programs that share the tokens of a full head; None chooses by the shapes.

    Returns:
        out [B, T, H, v] in the query's dtype and lse [B, T, H] in fp32 (float64 of float64), 0 and -∞ for a query
        before its row's first token.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """
    _check(query, full_key, full_value, streaming_key, streaming_value, lengths, starts)
    slots = streaming_key.shape[2]
    if sinks < 0 or recent < 1 or not 0 <= sink_slots <= min(sinks, slots):
        raise ValueError(f"hybrid_decode: {sink_slots} of {slots} slots for {sinks} sinks, {recent} recent tokens")
    if streaming_key.shape[1] and slots - sink_slots < query.shape[1]:
        raise ValueError(f"hybrid_decode: {slots - sink_slots} slots of the window for {query.shape[1]} new tokens")
    if splits is not None and splits < 1:
        raise ValueError(f"hybrid_decode: {splits} splits, at least 1 is needed")
    return _hybrid_decode(
        query,
        full_key,
        full_value,
        streaming_key,
        streaming_value,
        scale,
        sink_slots,
        sinks,
        recent,
        lengths,
        starts,
        splits,
    )


@torch.library.custom_op("surgery::hybrid_decode", mutates_args=())
def _hybrid_decode(
    query: Tensor,
    full_key: Tensor,
    full_value: Tensor,
    streaming_key: Tensor,
    streaming_value: Tensor,
    scale: float,
    sink_slots: int,
    sinks: int,
    recent: int,
    lengths: Tensor | None,
    starts: Tensor | None,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    tensors = (query, full_key, full_value, streaming_key, streaming_value, lengths, starts)
    reason = refusal(*tensors) or _unsupported(query, full_value)
    if reason:
        tell_once("hybrid_decode", reason)
        return hybrid_attention(*tensors[:5], scale, sink_slots, sinks, recent, lengths, starts)
    from surgery.kernels.hybrid_decode.kernel import default_config, launches, splits_of

    query, *cached = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors[:5])
    full, streaming = full_key.shape[1], streaming_key.shape[1]
    rows, tokens, heads, head_size = query.shape
    size = heads // (full + streaming)
    key = key_of(heads=heads, full=full, streaming=streaming, head_size=head_size, dtype=query.dtype)
    config = tuned("hybrid_decode", key, query.device, default_config(tokens * size, head_size, query.dtype))
    splits = splits or splits_of(query, full_key, size, config)
    out, lse = _outputs(query, full_value)
    scratch = []
    if splits > 1:
        merged = rows * tokens * full * size
        scratch = [lse.new_empty(merged, splits, full_value.shape[-1]), lse.new_empty(merged, splits)]
    for launch in launches(
        query, *cached, scale, sink_slots, sinks, recent, lengths, starts, out, lse, config, splits, *scratch
    ):
        launch.run()
    return out, lse


@_hybrid_decode.register_fake
def _(query, full_key, full_value, streaming_key, streaming_value, *_):
    return _outputs(query, full_value)


differentiate_by(_hybrid_decode, lambda *inputs: hybrid_attention(*inputs[:-1]))


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, T, H, v] and lse [B, T, H], uninitialised."""
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=wide)


def _unsupported(query: Tensor, value: Tensor) -> str | None:
    widest = max(query.shape[-1], value.shape[-1])
    return f"heads of {widest} numbers, at most {WIDEST}" if widest > WIDEST else None


def _check(
    query: Tensor,
    full_key: Tensor,
    full_value: Tensor,
    streaming_key: Tensor,
    streaming_value: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
) -> None:
    """Raises ValueError where tensors do not belong together."""
    named = {
        "query": query,
        "full_key": full_key,
        "full_value": full_value,
        "streaming_key": streaming_key,
        "streaming_value": streaming_value,
    }
    for name, tensor in named.items():
        if tensor.ndim != 4 or tensor.dtype != query.dtype or len(tensor) != len(query):
            raise ValueError(
                f"hybrid_decode: {name} is {tensor.dtype} {list(tensor.shape)}: four dimensions, dtype and rows of "
                f"query {query.dtype} {list(query.shape)} are needed"
            )
    for key, value in ((full_key, full_value), (streaming_key, streaming_value)):
        if key.shape[:3] != value.shape[:3] or key.shape[-1] != query.shape[-1]:
            raise ValueError(
                f"hybrid_decode: keys {list(key.shape)} and values {list(value.shape)} of queries {list(query.shape)}"
            )
    if full_value.shape[-1] != streaming_value.shape[-1]:
        raise ValueError(
            f"hybrid_decode: values of {full_value.shape[-1]} and of {streaming_value.shape[-1]} numbers in one layer"
        )
    groups = full_key.shape[1] + streaming_key.shape[1]
    if not groups or query.shape[2] % groups:
        raise ValueError(f"hybrid_decode: {query.shape[2]} query heads do not follow {groups} KV heads evenly")
    for name, given in (("lengths", lengths), ("starts", starts)):
        if given is not None and (given.dtype != torch.int32 or given.shape != query.shape[:1]):
            raise ValueError(
                f"hybrid_decode: {name} is {given.dtype} {list(given.shape)}, int32 [{len(query)}] is needed"
            )
