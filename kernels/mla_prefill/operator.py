"""Operator `surgery::mla_prefill`: differentiable attention for prefill and training; keys and values of any width."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.backend import refusal, tell_once
from surgery.kernels.checks import check_counts, check_dtypes, check_heads, check_keys, check_positive, too_wide
from surgery.kernels.mla_prefill.reference import document_bounds, prefill_attention
from surgery.kernels.operation import Operation, prefill_outputs, side_by_side


def mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of T queries over S positions, T ≤ S: prefill, chunked prefill or a training pass.

    Differentiable once in query, key and value, through both results. The PyTorch fallback materializes all logits.

    Args:
        query: [B, H, T, c] in bf16, fp16 or fp32, already rotated.
        key: [B, K, S, c]; H // K consecutive query heads share a KV head.
        value: [B, K, S, v].
        scale: positive, multiplies the logits.
        starts: int32 [B], the first position of a row that is no padding; None for 0.
        lengths: int32 [B], the position after the last one that is no padding; None for S.
        window: latest positions that a query sees, its own included; None for all.
        documents: int32 [B, S], document ID of each position; queries see only their own document. Documents are
            contiguous: an ID that recurs later is another document.

    Returns:
        out [B, T, H, v] in the dtype of `query`, and lse [B, H, T] in fp32, the natural logarithm of the sum of
        exponentials of a query's logits. Padding queries give 0 and -∞, whatever they hold, and no gradient.

    Raises:
        ValueError: inconsistent shapes or settings.
    """
    bounds = None
    if documents is not None:
        shape = (key.shape[0], key.shape[2])
        if documents.shape != shape or documents.dtype != torch.int32:
            description = f"{documents.dtype} {list(documents.shape)}"
            raise ValueError(f"mla_prefill: documents must be int32 {list(shape)}, not {description}")
        bounds = document_bounds(documents)
    return _mla_prefill(query, key, value, float(scale), window, starts, lengths, bounds)


def _check(call: SimpleNamespace) -> None:
    query, key, scale = call.query, call.key, call.scale
    name = "mla_prefill"
    check_keys(name, query, key, call.value)
    (batch, heads, tokens, _), (kv_heads, positions) = query.shape, key.shape[1:3]
    check_heads(name, heads, kv_heads)
    check_dtypes(name, query=query, key=key, value=call.value)
    if len(key) != batch:
        raise ValueError(f"{name}: batch size is {batch} for queries, {len(key)} for keys")
    if tokens > positions:
        raise ValueError(f"{name}: {tokens} queries, but only {positions} keys, which must include the queries' own")
    if scale <= 0:
        raise ValueError(f"{name}: scale must be positive, not {scale}")
    check_positive(name, window=call.window)
    check_counts(name, batch, starts=call.starts, lengths=call.lengths)


def unfit(query: Tensor, value: Tensor) -> str | None:
    """Return the reason why no kernel supports heads of these widths, or None.

    On an H100, with Triton 3.6, heads of 24 and 40 elements gave wrong results (error 0.34, bf16 and fp16). Triton's
    interpreter gives correct ones; the cause is unknown.
    """
    widths = query.shape[-1], value.shape[-1]
    if query.device.type == "cuda" and any(width % 16 for width in widths):
        return f"head sizes {widths[0]} and {widths[1]} must be multiples of 16"
    return too_wide(query, value)


_mla_prefill = Operation(
    "mla_prefill", prefill_attention, prefill_outputs, lambda call: unfit(call.query, call.value), _check
)


@torch.library.custom_op("surgery::mla_prefill_backward", mutates_args=())
def _mla_prefill_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    bounds: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    masks = (window, starts, lengths, bounds)
    gradients = _gradients(query, key, value)
    reason = refusal(grad_out, query, key, value, starts, lengths, bounds) or unfit(query, value)
    if reason:
        tell_once("the backward pass of mla_prefill", reason)
        # Autograd is disabled within an operator's implementation; functorch transforms work.
        _, pull_back = torch.func.vjp(lambda *tensors: prefill_attention(*tensors, scale, *masks), query, key, value)
        plain = pull_back((grad_out, torch.zeros_like(lse) if grad_lse is None else grad_lse))
        for gradient, computed in zip(gradients, plain, strict=True):
            gradient.copy_(computed)
        return gradients
    from surgery.kernels.mla_prefill.backward_kernel import backward_launches

    grad_out, query, key, value = map(side_by_side, (grad_out, query, key, value))
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    delta = torch.empty_like(lse)
    tensors = {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse, "delta": delta}
    for launch in backward_launches(query, key, value, scale, *masks, **tensors, gradients=gradients):
        launch.run()
    return gradients


def _gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate gradients as [B, T, H, ·] in memory, like projection outputs, which avoids a copy in the backward."""
    return tuple(
        torch.empty_like(tensor.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        for tensor in (query, key, value)
    )


@_mla_prefill_backward.register_fake
def _(grad_out, grad_lse, query, key, value, out, lse, scale, window, starts, lengths, bounds):
    return _gradients(query, key, value)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, scale, window, *masks = inputs
    ctx.save_for_backward(query, key, value, *output, *masks)
    ctx.settings = scale, window
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, *masks = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients = torch.ops.surgery.mla_prefill_backward(
        grad_out, grad_lse, query, key, value, out, lse, *ctx.settings, *masks
    )
    return (*gradients, *[None] * 5)


_mla_prefill.registered.register_autograd(_backward, setup_context=_setup_context)
