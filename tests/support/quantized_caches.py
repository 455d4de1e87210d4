"""Quantized caches for any model, by hand."""

from functools import partial

from transformers.cache_utils import Cache

from surgery.model.quantized_cache import QuantizedKVLayer


def quantized_cache(*settings, **more) -> Cache:
    """A cache of `QuantizedKVLayer`s of these settings, as many as are asked for."""
    return Cache(layer_class_to_replicate=partial(QuantizedKVLayer, *settings, **more))
