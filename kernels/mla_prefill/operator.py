"""Attention of a prompt or a training pass, differentiable, with keys and values of any widths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.kernels.backend import refusal, tell_once
from surgery.kernels.mla_prefill.reference import document_bounds, prefill_attention, prefill_gradients
from surgery.kernels.tuned import key_of, tuned

WIDEST = 256
"""Numbers of a key or a value that the kernels take: they hold rows and sums of them in registers."""


def mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    causal: bool = True,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of T queries over S slots, T ≤ S: a prompt, the next part of one, or a training pass.

    Differentiable once in query, key and value, through both results. In the CPU's or any other plain PyTorch
    computation all logits are held at once.

    Args:
        query: [B, H, T, c] in bf16, fp16 or fp32, already rotated.
        key: [B, K, S, c]; H // K query heads, one after the other, share a KV head.
        value: [B, K, S, v].
        scale: positive, multiplies the logits.
        causal: whether a query sees nothing behind its own slot.
        starts: int32 [B], the first slot of a row that is no padding; None for 0.
        lengths: int32 [B], the slot behind the last one that is no padding; None for S.
        window: how many latest slots a query sees, its own included; None for all.
        documents: int32 [B, S], the document of each slot; queries see their own only. Tokens of a document stand
            together: a number that comes again further on is another document.
        offsets: int32 [B], the slot of each row's first query; None for S - T, where the queries are the last slots.

    Returns:
        [B, T, H, v] in the dtype of `query`, and [B, H, T] in fp32, the natural logarithm of the sum of exponentials of
        a query's logits. Queries that are padding give 0 and -∞, whatever they hold, and no gradient.

    Raises:
        ValueError: shapes or settings that do not fit together.
    """
    _check(query, key, value, scale, causal, starts, lengths, window, documents, offsets)
    bounds = None if documents is None else document_bounds(documents)
    return _mla_prefill(query, key, value, float(scale), causal, window, starts, lengths, bounds, offsets)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    starts: Tensor | None,
    lengths: Tensor | None,
    window: int | None,
    documents: Tensor | None,
    offsets: Tensor | None,
) -> None:
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"mla_prefill: query, key, value have {query.ndim}, {key.ndim}, {value.ndim} axes, not 4 each")
    batch, heads, tokens, width = query.shape
    kv_heads, slots = key.shape[1:3]
    if key.shape != (batch, kv_heads, slots, width) or value.shape[:3] != key.shape[:3]:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(f"mla_prefill: shapes {shapes} are not [B, H, T, c], [B, K, S, c], [B, K, S, v]")
    if heads % kv_heads:
        raise ValueError(f"mla_prefill: {heads} query heads are no multiple of {kv_heads} KV heads")
    if tokens > slots:
        raise ValueError(f"mla_prefill: {tokens} queries over {slots} slots: the queries' own keys must be among them")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"mla_prefill: query, key, value are {query.dtype}, {key.dtype}, {value.dtype}, not one dtype")
    if scale <= 0:
        raise ValueError(f"mla_prefill: scale {scale} is not positive")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"mla_prefill: a window of {window} needs to be at least 1, and causal attention")
    for name, given, shape in (
        ("starts", starts, (batch,)),
        ("lengths", lengths, (batch,)),
        ("offsets", offsets, (batch,)),
        ("documents", documents, (batch, slots)),
    ):
        if given is not None and (given.shape != shape or given.dtype != torch.int32):
            found = f"{given.dtype} {list(given.shape)}"
            raise ValueError(f"mla_prefill: {name} is {found}, not torch.int32 {list(shape)}")


def _unsupported(query: Tensor, value: Tensor) -> str | None:
    widest = max(query.shape[-1], value.shape[-1])
    return f"{widest} numbers of a head, and kernels take up to {WIDEST}" if widest > WIDEST else None


def _rows(tensor: Tensor | None) -> Tensor | None:
    """A tensor whose rows are contiguous, as kernels read them."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _key(query: Tensor, key: Tensor, value: Tensor) -> str:
    return key_of(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key=query.shape[-1],
        value=value.shape[-1],
        dtype=query.dtype,
    )


@torch.library.custom_op("surgery::mla_prefill", mutates_args=())
def _mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    bounds: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    masks = (causal, window, starts, lengths, bounds, offsets)
    reason = refusal(query, key, value, starts, lengths, bounds, offsets) or _unsupported(query, value)
    if reason:
        tell_once("mla_prefill", reason)
        out, lse = prefill_attention(query, key, value, scale, *masks)
        return out.contiguous(), lse.contiguous()
    from surgery.kernels.mla_prefill.kernel import capability_of, default_config, launches

    default = default_config(query.dtype.itemsize, capability_of(query.device))
    config = tuned("mla_prefill", _key(query, key, value), query.device, default)
    query, key, value = _rows(query), _rows(key), _rows(value)
    out, lse = _outputs(query, value)
    names = ("causal", "window", "starts", "lengths", "bounds", "offsets")
    for launch in launches(query, key, value, out, lse, scale, **dict(zip(names, masks, strict=True)), config=config):
        launch.run()
    return out, lse


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    log_dtype = torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty(batch, tokens, heads, value.shape[-1]),
        query.new_empty(batch, heads, tokens, dtype=log_dtype),
    )


@_mla_prefill.register_fake
def _(query, key, value, scale, causal, window, starts, lengths, bounds, offsets):
    return _outputs(query, value)


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
    causal: bool,
    window: int | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    bounds: Tensor | None,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    masks = (causal, window, starts, lengths, bounds, offsets)
    gradients = _gradients(query, key, value)
    reason = refusal(grad_out, query, key, value, starts, lengths, bounds, offsets) or _unsupported(query, value)
    if reason:
        tell_once("the backward pass of mla_prefill", reason)
        plain = prefill_gradients(grad_out, grad_lse, query, key, value, scale, *masks)
        for gradient, computed in zip(gradients, plain, strict=True):
            gradient.copy_(computed)
        return gradients
    from surgery.kernels.mla_prefill.backward_kernel import BackwardConfigs, backward_launches, default_configs
    from surgery.kernels.mla_prefill.kernel import capability_of

    default = default_configs(query.dtype.itemsize, capability_of(query.device))
    shape = _key(query, key, value)
    configs = BackwardConfigs(
        keys=tuned("mla_prefill_keys", shape, query.device, default.keys),
        queries=tuned("mla_prefill_queries", shape, query.device, default.queries),
    )
    names = ("causal", "window", "starts", "lengths", "bounds", "offsets")
    for launch in backward_launches(
        _rows(grad_out),
        None if grad_lse is None else grad_lse.contiguous(),
        _rows(query),
        _rows(key),
        _rows(value),
        out,
        lse,
        torch.empty_like(lse),
        *gradients,
        scale,
        **dict(zip(names, masks, strict=True)),
        configs=configs,
    ):
        launch.run()
    return gradients


def _gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for them: laid out as heads are projected, [B, T, H, ·] in memory, which spares a copy on the way back."""
    return tuple(
        torch.empty_like(tensor.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        for tensor in (query, key, value)
    )


@_mla_prefill_backward.register_fake
def _(
    grad_out, grad_lse, query, key, value, out, lse, scale, causal, window, starts, lengths, bounds, offsets
):  # fmt: skip
    return _gradients(query, key, value)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, scale, causal, window, *masks = inputs
    ctx.save_for_backward(query, key, value, *output, *masks)
    ctx.settings = scale, causal, window
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, *masks = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    gradients = torch.ops.surgery.mla_prefill_backward(
        grad_out, grad_lse, query, key, value, out, lse, *ctx.settings, *masks
    )
    return (*gradients, *[None] * 7)


_mla_prefill.register_autograd(_backward, setup_context=_setup_context)
