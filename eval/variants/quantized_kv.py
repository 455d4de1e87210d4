"""The baseline with a KV cache of integers."""

from __future__ import annotations

from functools import partial

from torch import nn
from transformers import PreTrainedModel

from surgery.eval.variants.cache_hook import Call, install, own_cache, refusals
from surgery.model.quantized_cache import QuantizedKVCache


def quantize_kv(model: PreTrainedModel, bits: int, group: int = 32, window: int = 0) -> PreTrainedModel:
    """Makes every attention of `model` read keys and values that are quantised as `QuantizedKVLayer` does it.

    A plain forward pass reads as much of the text quantised as a cache of the whole of it holds. In a padded batch,
    padding shares groups with the tokens beside it, so its rows are quantised a little differently than they would be
    alone.

    Args:
        bits: of a number: 8, 4 or 2.
        group: tokens (of keys) and channels (of values) that share a scale.
        window: most recent tokens that stay exact; 0 quantises every complete group.

    Returns:
        `model` itself, with a hook on its decoder.

    Raises:
        SurgeryError: impossible settings, a model with other layers than full attention, or one that is a variant
            already. Later: a call with a filled cache of another kind.
    """
    new_cache = partial(QuantizedKVCache, bits, group, window)
    with refusals():
        new_cache()

    def prepare(decoder: nn.Module, call: Call) -> None:
        own_cache(decoder, call, new_cache)

    return install(model, f"an int{bits} KV cache", prepare)
