"""Live caches of streamed layers: new ones, what may be asked of them, and their bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surgery.eval.tensor_bytes import plain_tensors, storage_bytes
from surgery.model.group_cache import GroupLayer
from surgery.running.layer_stream import LayerStream, StreamedLayer

# Tokens that are decoded one by one through a live cache, after a prompt.
STEPS = 8


def new_cache(layer: StreamedLayer):
    """An empty cache such as ``generate`` makes it; the layer puts in what it keeps."""
    from transformers import DynamicCache

    return DynamicCache(config=layer.config)


def prompt_of(tokens: int) -> int:
    """How many of that many tokens are taken for the prompt."""
    return max(1, tokens - STEPS)


@torch.no_grad()
def run_through_cache(
    stream: LayerStream,
    layer: StreamedLayer,
    hidden: Tensor,
    batch_size: int,
    piece: int,
    new_cache: Callable[[], object],
) -> Tensor:
    """Applies a layer to [N, T, D] ``piece`` tokens at a time through caches of ``new_cache()``, in place.

    As every layer sees the same pieces, this is the model decoding that many tokens at a time.
    """
    for rows in hidden.split(batch_size):
        cache = new_cache()
        for part in rows.split(piece, dim=1):
            inputs = part.to(stream.device, stream.dtype)
            part.copy_(layer.model(inputs_embeds=inputs, past_key_values=cache, use_cache=True).last_hidden_state)
    return hidden


def reads_ahead(cache) -> bool:
    """Whether one pass over a text is another function than decoding it."""
    # A layer may keep its latents in another one, beside exact tokens.
    held = [*cache.layers, *(getattr(layer, "latents", None) for layer in cache.layers)]
    return any(getattr(layer, "reads_ahead", False) for layer in held)


def takes_prompt_whole(cache) -> bool:
    """Whether the first piece of a text decides how its tokens are kept."""
    return any(isinstance(layer, GroupLayer) and layer.block is None for layer in cache.layers)


def counts_slots(cache) -> bool:
    """Whether padding before a text moves the edges between tokens that are kept together."""
    return reads_ahead(cache) or any(isinstance(layer, GroupLayer) for layer in cache.layers)


def bytes_in(weight_dtype: torch.dtype, cache, dtype: torch.dtype) -> int:
    """Bytes of a live cache, were the numbers that it holds in the ``dtype`` of the run those of a model in another."""
    held = [tensor for tensor in plain_tensors(cache) if tensor.ndim > 0 or tensor.is_floating_point()]
    parts = [part for layer in cache.layers for part in getattr(layer, "parts", [layer])]
    wide = [tensor for part in parts for tensor in getattr(part, "wide_tensors", ())]
    as_wide = torch.promote_types(weight_dtype, torch.float32)
    of_model = [tensor for tensor in held if tensor.dtype == dtype and not any(tensor is other for other in wide)]
    numbers = storage_bytes(of_model) // dtype.itemsize * weight_dtype.itemsize
    codes = storage_bytes(t for t in held if t.dtype != dtype and not any(t is other for other in wide))
    return numbers + codes + sum(tensor.numel() for tensor in wide) * as_wide.itemsize
