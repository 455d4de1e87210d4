"""Gives a loaded model another kind of cache, wherever its decoder is called from: see `surgery.model.cache_layer`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from surgery.common.errors import SurgeryError
from surgery.model.cache_layer import CacheLayer, Call, CompactLayer, check_full_attention, hook_calls
from surgery.model.cache_prediction import CachedLayer


class NoVariant(SurgeryError):
    """A model has no such variant."""


def install(
    model: PreTrainedModel, name: str, prepare: Callable[[nn.Module, Call], None], layers: Sequence[CacheLayer]
) -> PreTrainedModel:
    """Let `prepare(decoder, call)` change the arguments of every call of the decoder of `model`; return `model`.

    A ValueError of `prepare` is raised as SurgeryError. `model.kv_bytes(tokens)` becomes the bytes of a cache of
    `layers`, one for each of the model's, by formula. Layers with a window may be among them (`beside_windows`).

    Raises:
        NoVariant: the model is no decoder with a head, has a quantized cache, layers of several kinds, or heads that
            the cache cannot hold.
        SurgeryError: it is a variant already.
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
    """Return the tokens that layers with an attention window see, by index, as transformers' own cache has them.

    Raises:
        NoVariant: all layers have one.
    """
    layers = DynamicCache(config=config).layers
    windows = {index: layer.sliding_window for index, layer in enumerate(layers) if getattr(layer, "is_sliding", False)}
    if windows and len(windows) == len(layers):
        raise NoVariant("all layers are of sliding_attention: no cache grows with the context")
    return windows


def beside_windows(layers: Sequence[CompactLayer], windows: Mapping[int, int]) -> list[CacheLayer]:
    """Replace layers of a cache by transformers' own where there is a window (`windows_of`): they keep full precision.

    vLLM leaves them so with `--kv-cache-dtype-skip-layers sliding_window`, as read in the source of its 0.32, not run.
    """
    return [
        DynamicSlidingWindowLayer(windows[index]) if index in windows else layer for index, layer in enumerate(layers)
    ]


def bytes_of(layers: Sequence[CacheLayer], config: PreTrainedConfig, dtype: torch.dtype) -> Callable[[int], int]:
    """Predict the bytes of a cache of `layers` after so many tokens of one sequence.

    The prediction raises ValueError of heads that a layer cannot hold.
    """
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = [CachedLayer(layer, 1, heads, width, width, dtype) for layer in layers]
    return lambda tokens: sum(layer.held(tokens) for layer in cached)


def check_model(model: PreTrainedModel, name: str, windows: Collection[int] = ()) -> None:
    """Raises as `install` does of a model that is no decoder with a head or has no full attention but in `windows`."""
    decoder = model.base_model
    if (variant := getattr(decoder, "surgery_variant", None)) is not None:
        raise SurgeryError(f"this model is a variant already, with {variant}: load the baseline again for another one")
    if decoder is model or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise NoVariant(f"{type(model).__name__} is not a decoder with a head: {name} needs a causal language model")
    if getattr(model.config, "kv_cache", None):
        raise NoVariant(f"the checkpoint has a quantized KV cache of its own: {name} needs the one that it was made of")
    with refusals(NoVariant):
        check_full_attention(model.config, name, windows)


@contextmanager
def refusals(kind: type[SurgeryError] = SurgeryError) -> Iterator[None]:
    """Refusals of the caches, which know no error of this package, as one of ``kind``."""
    try:
        yield
    except ValueError as error:
        raise kind(str(error)) from None
