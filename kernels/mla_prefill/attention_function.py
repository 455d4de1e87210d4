"""Prefill attention with the signature of transformers' AttentionInterface, registered by `surgery.accelerate`.

A check whether a mask is causal would synchronize with the device, so the mask's shape decides: None is causal
attention, [B, S] is causal attention with padding, and any other mask falls back to PyTorch's attention. So do dropout,
non-causal attention, and tensors that no kernel supports.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from surgery.kernels.backend import refusal
from surgery.kernels.mla_prefill.operator import mla_prefill, unfit
from surgery.kernels.mla_prefill.reference import document_bounds, visible_positions


def prefill_attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    documents: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute differentiable attention with the signature of transformers' AttentionInterface.

    Without a mask and with more positions than queries, queries are the first positions, as in transformers' `sdpa`,
    which then omits the mask only for an empty static cache. With a mask [B, S] they are the last positions.

    Args:
        module: attention module; its `is_causal` applies if the argument is None.
        query: [B, H, T, c], rotated.
        key: [B, K, S, c].
        value: [B, K, S, v].
        attention_mask: None; [B, S], nonzero for tokens that are no padding, contiguous in each row; or
            [B or 1, H or 1, T, S], boolean or added to the logits.
        dropout: dropout probability of the attention weights.
        scaling: multiplies the logits; None for c^-½.
        is_causal: None for the module's.
        sliding_window: latest positions that a query sees; a mask with four axes must include it.
        documents: int32 [B, S], as in `mla_prefill`.

    Returns:
        [B, T, H, v], contiguous, and None for the attention weights.

    Raises:
        ValueError: a softcap, which is not supported, or a mask of any other shape.
    """
    if kwargs.get("softcap") is not None:
        raise ValueError("attention 'surgery' does not support softcap; use attn_implementation 'eager'")
    _check_mask(attention_mask, key)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    tokens = query.shape[2]
    if attention_mask is None and causal and 1 < tokens < key.shape[2]:
        key, value = key[:, :, :tokens], value[:, :, :tokens]
        documents = None if documents is None else documents[:, :tokens]
    masks: dict[str, Any] = {"window": sliding_window if causal else None}
    if attention_mask is not None and attention_mask.ndim == 2:
        masks |= _padding(attention_mask)
    spelled = attention_mask is not None and attention_mask.ndim == 4
    refused = refusal(query, key, value) or unfit(query, value)
    if not (spelled or refused or dropout or not causal):
        return mla_prefill(query, key, value, scaling, documents=documents, **masks)[0], None
    mask = attention_mask if spelled else _mask(query, key, documents, masks, causal)
    if spelled and documents is not None:
        same = visible_positions(
            tokens, key.shape[2], causal=causal, bounds=document_bounds(documents), device=query.device
        )[:, None]
        mask = mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, torch.finfo(mask.dtype).min)
    return _torch_attention(query, key, value, mask, causal and tokens > 1, dropout, scaling), None


def _check_mask(mask: Tensor | None, key: Tensor) -> None:
    if mask is not None and mask.ndim != 4 and mask.shape != (key.shape[0], key.shape[2]):
        expected = f"[{key.shape[0]}, {key.shape[2]}] or have 4 dimensions"
        raise ValueError(f"attention 'surgery': attention_mask must be {expected}, not {list(mask.shape)}")


def _padding(mask: Tensor) -> dict[str, Tensor]:
    """Return `starts` and `lengths` of a mask [B, S] whose nonzero entries are contiguous in each row."""
    present = (mask != 0).int()
    starts = present.argmax(1)
    return {"starts": starts.int(), "lengths": (starts + present.sum(1)).int()}


def _mask(query: Tensor, key: Tensor, documents: Tensor | None, masks: dict[str, Any], causal: bool) -> Tensor | None:
    """Build the mask for PyTorch's attention; None if `is_causal` is enough."""
    tokens, positions = query.shape[2], key.shape[2]
    window = masks["window"]
    hidden = documents is not None or "starts" in masks or (window is not None and window < positions)
    if not hidden:
        return None
    bounds = None if documents is None else document_bounds(documents)
    return visible_positions(tokens, positions, bounds=bounds, causal=causal, device=query.device, **masks)[:, None]


def _torch_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float, scale: float
) -> Tensor:
    """Call PyTorch's attention, on the CPU with padding: its fused kernel needs keys and values of equal width."""
    width, value_width = query.shape[-1], value.shape[-1]
    if query.device.type == "cpu" and width != value_width:
        widest = max(width, value_width)
        query, key = (pad(tensor, (0, widest - width)) for tensor in (query, key))
        value = pad(value, (0, widest - value_width))
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale
    )
    return out[..., :value_width].transpose(1, 2).contiguous()
