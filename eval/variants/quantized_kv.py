"""Baseline with a quantized KV cache."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from surgery.eval.variants.cache_hook import install, refusals, windows_of, with_sliding_windows
from surgery.model.cache_layer import CacheLayer, Call, own_cache
from surgery.model.quantized_cache import QuantizedKVLayer


def quantize_kv(model: PreTrainedModel, format: str, group: int = 32, window: int = 0) -> PreTrainedModel:
    """Replace the KV cache of `model` by one with `QuantizedKVLayer`s; sliding-window layers keep transformers' layers.

    In one forward pass over a text, attention reads the same tokens quantized that a cache of the whole text holds
    quantized. In a padded batch, padding shares quantization groups with adjacent tokens. Formats are int8, int4, int3,
    int2 and fp8; `group` tokens (of keys) or channels (of values) share a scale; the most recent `window` stays in full
    precision.

    Raises:
        NoVariant: no layer of the model has full attention.
        SurgeryError: invalid settings, or the model is a variant already. Raised later: a call passes a non-empty cache
            of another class.
    """

    count, windows = model.config.num_hidden_layers, windows_of(model.config)

    def new_layers() -> list[CacheLayer]:
        return with_sliding_windows([QuantizedKVLayer(format, group, window) for _ in range(count)], windows)

    with refusals():
        empty = new_layers()

    def prepare(decoder: nn.Module, call: Call) -> None:
        own_cache(decoder, call, new_layers())

    return install(model, f"an {format} KV cache", prepare, empty)
