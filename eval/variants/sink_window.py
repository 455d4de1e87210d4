"""Baseline with attention sinks and a window of recent tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import BoolTensor, Tensor, nn
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.variants.cache_hook import NoVariant, install, refusals
from surgery.model.cache_layer import Call, keeps_cache, own_cache
from surgery.model.left_padding import LeftPadding
from surgery.model.sink_window_cache import SinkWindowCache

ATTENTIONS = ("sdpa", "eager")
"""Attention implementations that accept arbitrary masks."""


def sink_window(model: PreTrainedModel, sinks: int, recent: int) -> PreTrainedModel:
    """Restrict attention of `model` to the first `sinks` tokens and the last `recent` tokens, the query's included.

    One forward pass, chunked prefill and decoding give equal results, see `surgery.model.sink_window_cache`. Batches
    may be padded on the left, and without a cache also on the right.

    Raises:
        NoVariant: some layers do not have full attention, or the attention implementation takes no mask.
        SurgeryError: invalid settings, or the model is a variant already. Raised later: a call passes a non-empty cache
            of another class, a mask that is not [B, T], or a cache and padding after the first token of a row.
    """
    new_cache = partial(SinkWindowCache, sinks, recent, model.config.num_hidden_layers)
    with refusals():
        empty = new_cache().layers
    attention = model.config._attn_implementation
    if attention not in ATTENTIONS:
        raise NoVariant(
            f"a window with sinks needs a mask, which {attention} attention does not take: "
            "load the model with attn_implementation='sdpa'"
        )

    def prepare(decoder: nn.Module, call: Call) -> None:
        new = call.get("inputs_embeds") if call.get("input_ids") is None else call["input_ids"]
        if new is None:
            return  # the decoder raises a clearer error
        keep = keeps_cache(decoder, call)
        layers = (own_cache(decoder, call, new_cache().layers) if keep else new_cache()).layers
        batch, queries = new.shape[:2]
        total = layers[0].seen + queries
        real = _real_tokens(call.get("attention_mask"), batch, total)
        padding = LeftPadding.of_mask(real) if real is not None else layers[0].padding or LeftPadding([0] * batch)
        for layer in layers:
            layer.padding = padding
        visible = layers[0].visible(queries, new.device)
        if real is not None and padding.has_gaps:
            if keep:
                raise SurgeryError("right padding is not supported: pad on the left")
            own = torch.eye(queries, dtype=torch.bool, device=visible.device)
            visible = visible & (real[:, None, None, :].to(visible.device) | own)
        eager = decoder.config._attn_implementation == "eager"
        call["attention_mask"] = _additive(visible, decoder.dtype) if eager else visible

    return install(model, f"a window of {recent} tokens and {sinks} sinks", prepare, empty)


def _real_tokens(mask: Tensor | None, batch: int, total: int) -> BoolTensor | None:
    """Validate a padding mask [batch, total] and convert it to bool; None without a mask."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != (batch, total):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise SurgeryError(
            f"the attention mask is {shape}: a model with a window and sinks takes [batch, all tokens so far], "
            f"here {[batch, total]}"
        )
    return mask.bool()


def _additive(visible: BoolTensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to an additive one: 0 where visible, else the dtype's minimum."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)
