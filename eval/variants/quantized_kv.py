"""The baseline with a KV cache of few bits."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from surgery.eval.variants.cache_hook import beside_windows, install, refusals, windows_of
from surgery.model.cache_layer import CacheLayer, Call, own_cache
from surgery.model.quantized_cache import QuantizedKVLayer


def quantize_kv(model: PreTrainedModel, format: str, group: int = 32, window: int = 0) -> PreTrainedModel:
    """Makes every attention of `model` read keys and values that are quantized as `QuantizedKVLayer` does it.

    A plain forward pass reads as much of the text quantized as a cache of the whole of it holds. In a padded batch,
    padding shares groups with the tokens next to it, so its rows are quantized a little differently than they would be
    alone.

    Args:
        format: of a number: int8, int4, int3, int2 or fp8.
        group: tokens (of keys) and channels (of values) that share a scale.
        window: most recent tokens that stay exact; 0 quantizes every complete group.

    Returns:
        `model` itself, with a hook on its decoder.

    Raises:
        NoVariant: a model without full attention in any layer; layers with a window keep transformers' own cache.
        SurgeryError: impossible settings, or a model that is a variant already. Later: a call with a filled cache of
            another kind.
    """

    count, windows = model.config.num_hidden_layers, windows_of(model.config)

    def new_layers() -> list[CacheLayer]:
        return beside_windows([QuantizedKVLayer(format, group, window) for _ in range(count)], windows)

    with refusals():
        empty = new_layers()

    def prepare(decoder: nn.Module, call: Call) -> None:
        own_cache(decoder, call, new_layers())

    return install(model, f"an {format} KV cache", prepare, empty)
