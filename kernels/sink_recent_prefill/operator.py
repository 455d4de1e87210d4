"""`sink_recent_prefill`: attention of a text where every KV head has sinks and a window of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.backend import refusal, tell_once
from surgery.kernels.reference_gradient import differentiate_by
from surgery.kernels.sink_recent_prefill.reference import sink_recent_attention
from surgery.kernels.tuned import key_of, tuned

WIDEST = 256
"""Numbers of a key or value that one tile can hold."""


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
    """Causal attention in which a KV head sees its first and last tokens (DuoAttention, arXiv:2410.10819), or all.

    The query at place q sees the key at place p ≤ q, p ≥ start, if q - p < `recent` or p - start < `sinks` of its head;
    tiles of keys that no query of a block sees are never read. Query t stands at place S - T + t. A query that is
    padding sees itself alone, so its result is its own value; of padding only what is among the last T tokens is read,
    and must be finite.

    Gradients are those of the reference, whose memory is that of all logits.

    Args:
        query: [B, H, T, d].
        key, value: [B, G, S, d] and [B, G, S, v], S ≥ T, of all tokens of the text.
        scale: multiplies the logits.
        sinks, recent: of each KV head, int32 [G]; `recent` ≥ 1, or negative for all tokens. Not read on the host.
        starts: the first token of each row that is no padding, int32 [B]; None is 0.

    Returns:
        out [B, T, H, v] in the query's dtype and lse [B, H, T] in fp32 (float64 of float64).

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """
    _check(query, key, value, sinks, recent, starts)
    return _sink_recent_prefill(query, key, value, scale, sinks, recent, starts)


@torch.library.custom_op("surgery::sink_recent_prefill", mutates_args=())
def _sink_recent_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sinks: Tensor,
    recent: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    reason = refusal(query, key, value, sinks, recent, starts) or _unsupported(query, value)
    if reason:
        tell_once("sink_recent_prefill", reason)
        return sink_recent_attention(query, key, value, scale, sinks, recent, starts)
    from surgery.kernels.sink_recent_prefill.kernel import default_config, launches

    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    head_size = max(query.shape[-1], value.shape[-1])
    shape = key_of(heads=query.shape[1], groups=key.shape[1], head_size=head_size, dtype=query.dtype)
    config = tuned("sink_recent_prefill", shape, query.device, default_config(head_size, query.dtype))
    out, lse = _outputs(query, value)
    sinks, recent = sinks.contiguous(), recent.contiguous()
    for launch in launches(query, key, value, scale, sinks, recent, starts, out, lse, config):
        launch.run()
    return out, lse


@_sink_recent_prefill.register_fake
def _(query, key, value, *_):
    return _outputs(query, value)


differentiate_by(_sink_recent_prefill, sink_recent_attention)


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, T, H, v] and lse [B, H, T], uninitialised."""
    rows, heads, tokens, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(rows, tokens, heads, value.shape[-1]), query.new_empty(rows, heads, tokens, dtype=wide)


def _unsupported(query: Tensor, value: Tensor) -> str | None:
    widest = max(query.shape[-1], value.shape[-1])
    return f"heads of {widest} numbers, at most {WIDEST}" if widest > WIDEST else None


def _check(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, recent: Tensor, starts: Tensor | None) -> None:
    """Raises ValueError where tensors do not belong together."""
    shapes = f"queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)}"
    if any(tensor.ndim != 4 or len(tensor) != len(query) for tensor in (query, key, value)):
        raise ValueError(f"sink_recent_prefill: {shapes}: four dimensions and equal rows are needed")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"sink_recent_prefill: dtypes {query.dtype}, {key.dtype} and {value.dtype}: one is needed")
    if key.shape[:3] != value.shape[:3] or key.shape[-1] != query.shape[-1]:
        raise ValueError(f"sink_recent_prefill: {shapes} do not belong together")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"sink_recent_prefill: {query.shape[1]} query heads do not follow {key.shape[1]} KV heads evenly"
        )
    if query.shape[2] > key.shape[2]:
        raise ValueError(f"sink_recent_prefill: {query.shape[2]} queries of a text of {key.shape[2]} tokens")
    for name, given, size in (
        ("sinks", sinks, key.shape[1]),
        ("recent", recent, key.shape[1]),
        ("starts", starts, len(query)),
    ):
        if given is not None and (given.dtype != torch.int32 or given.shape != (size,)):
            raise ValueError(
                f"sink_recent_prefill: {name} is {given.dtype} {list(given.shape)}, int32 [{size}] is needed"
            )
