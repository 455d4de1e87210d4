"""Hooks that replace the KV cache of a loaded model at every call of its decoder; see `surgery.model.cache_layer`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from surgery.common.errors import SurgeryError
from surgery.model.cache_layer import CachedLayer, CacheLayer, Call, CompactLayer, check_full_attention, hook_calls


class NoVariant(SurgeryError):
    """Raised for models that a variant does not support."""


def install(
    model: PreTrainedModel, name: str, prepare: Callable[[nn.Module, Call], None], layers: Sequence[CacheLayer]
) -> PreTrainedModel:
    """Hook the decoder so that `prepare(decoder, call)` can change the arguments of every call; return `model`.

    Sets `model.kv_bytes(tokens)`, the predicted bytes of a cache of `layers`, one per model layer, sliding-window
    layers included (`with_sliding_windows`). A ValueError in `prepare` is raised as SurgeryError.

    Raises:
        NoVariant: the model is not a decoder with an LM head, has a quantized cache, layers without full attention and
            without a window in `layers`, or heads that the cache does not support.
        SurgeryError: the model is a variant already.
    """
    check_model(model, name, [index for index, layer in enumerate(layers) if not isinstance(layer, CompactLayer)])
    decoder = model.base_model

    def refusing(module: nn.Module, call: Call) -> None:
        with refusals():
            prepare(module, call)

    kv_bytes = bytes_of(layers, model.config, next(model.parameters()).dtype)
    with refusals(NoVariant):
        kv_bytes(1)
    hook_calls(decoder, refusing)
    decoder.surgery_variant, model.kv_bytes = name, kv_bytes
    return model


def windows_of(config: PreTrainedConfig) -> dict[int, int]:
    """Return the window sizes in tokens of sliding-window layers, by layer index, as in transformers' cache.

    Raises NoVariant: all layers have a sliding window.
    """
    layers = DynamicCache(config=config).layers
    windows = {index: layer.sliding_window for index, layer in enumerate(layers) if getattr(layer, "is_sliding", False)}
    if windows and len(windows) == len(layers):
        raise NoVariant("all layers are of sliding_attention: no cache grows with the context")
    return windows


def with_sliding_windows(layers: Sequence[CompactLayer], windows: Mapping[int, int]) -> list[CacheLayer]:
    """Replace the cache layers of sliding-window layers (`windows_of`) by transformers' full-precision ones.

    Corresponds to vLLM's `--kv-cache-dtype-skip-layers sliding_window`, according to the source of 0.32; not run.
    """
    return [
        DynamicSlidingWindowLayer(windows[index]) if index in windows else layer for index, layer in enumerate(layers)
    ]


def bytes_of(layers: Sequence[CacheLayer], config: PreTrainedConfig, dtype: torch.dtype) -> Callable[[int], int]:
    """Return a function that predicts the bytes of a cache of `layers` from the number of tokens of one sequence.

    The function raises ValueError for head sizes that a layer does not support.
    """
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = [CachedLayer(layer, 1, heads, width, width, dtype) for layer in layers]
    return lambda tokens: sum(layer.held(tokens) for layer in cached)


def check_model(model: PreTrainedModel, name: str, windows: Collection[int] = ()) -> None:
    """Raise NoVariant or SurgeryError as `install` does; layers outside `windows` must have full attention."""
    decoder = model.base_model
    if (variant := getattr(decoder, "surgery_variant", None)) is not None:
        raise SurgeryError(f"the model already has {variant} installed: load the baseline again for another variant")
    if decoder is model or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise NoVariant(f"{type(model).__name__} is not a causal language model, which {name} needs")
    if getattr(model.config, "kv_cache", None):
        raise NoVariant(f"the checkpoint has a quantized KV cache of its own: {name} needs the one that it was made of")
    with refusals(NoVariant):
        check_full_attention(model.config, name, windows)


@contextmanager
def refusals(kind: type[SurgeryError] = SurgeryError) -> Iterator[None]:
    """Convert the ValueErrors of cache layers, which do not import this package's errors, to ``kind``."""
    try:
        yield
    except ValueError as error:
        raise kind(str(error)) from None
