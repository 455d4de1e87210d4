"""Gives a loaded model another kind of cache, wherever its decoder is called from.

A hook on the decoder sees every call: of the causal model, of `generate`, and of the decoder alone. Without a cache to
keep (`use_cache=False`) the decoder gets one for that call only, because attention must read what the cache would give.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from surgery.errors import SurgeryError
from surgery.model.cache_layer import CompactLayer, check_full_attention, is_empty

Call = dict[str, Any]
"""Arguments of one call of the decoder, by name."""


def install(model: PreTrainedModel, name: str, prepare: Callable[[nn.Module, Call], None]) -> PreTrainedModel:
    """Has `prepare(decoder, call)` change the arguments of every call of the decoder of `model`; returns `model`.

    Raises:
        SurgeryError: the model is a variant already, is no decoder with a head, or has layers of several kinds.
    """
    check_no_variant(model)
    decoder = model.base_model
    if decoder is model or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise SurgeryError(f"{type(model).__name__} is not a decoder with a head: {name} needs a causal language model")
    with refusals():
        check_full_attention(model.config, name)
    names = list(inspect.signature(decoder.forward).parameters)

    def before(module: nn.Module, args: tuple, kwargs: Call) -> tuple[tuple, Call]:
        call = dict(zip(names, args, strict=False)) | kwargs
        prepare(module, call)
        return (), call

    decoder.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    decoder.register_forward_hook(_without_temporary_cache, with_kwargs=True)
    decoder.surgery_variant = name
    return model


def check_no_variant(model: PreTrainedModel) -> None:
    """Raises SurgeryError if a variant's hook is on the model's decoder."""
    if (name := getattr(model.base_model, "surgery_variant", None)) is not None:
        raise SurgeryError(f"this model is a variant already, with {name}: load the baseline again for another one")


@contextmanager
def refusals() -> Iterator[None]:
    """Refusals of the caches, which know no error of this package, as SurgeryError."""
    try:
        yield
    except ValueError as error:
        raise SurgeryError(str(error)) from None


def keeps_cache(decoder: nn.Module, call: Call) -> bool:
    """Whether the caller has given a cache or wants one back."""
    use_cache = call.get("use_cache")
    use_cache = getattr(decoder.config, "use_cache", True) if use_cache is None else use_cache
    return bool(use_cache) or call.get("past_key_values") is not None


def own_cache(decoder: nn.Module, call: Call, new_cache: Callable[[], Cache]) -> Cache:
    """The cache of `call`, of layers as those of `new_cache()`; put into `call`.

    An empty `DynamicCache`, as `generate` makes it, gets new layers itself, so that whoever holds it holds the filled
    cache. One of the right layers is continued.

    Raises:
        SurgeryError: a cache of another kind.
    """
    cache, new = call.get("past_key_values"), new_cache()
    if cache is None:
        new.temporary = not keeps_cache(decoder, call)
        call["past_key_values"] = new
        return new
    wanted = _layers(new)[0]
    if type(cache) in (DynamicCache, type(new)) and not cache.offloading:
        if all(_alike(layer, wanted) for layer in _layers(cache)):
            return cache
        if type(cache) is DynamicCache and is_empty(cache):
            cache.layers, cache.layer_class_to_replicate = new.layers, new.layer_class_to_replicate
            return cache
    raise SurgeryError(
        f"this model keeps {wanted.form} and was given a {type(cache).__name__} that it cannot continue: "
        "pass none, an empty DynamicCache without offloading, or the cache that it returned"
    )


def _layers(cache: Cache) -> list[CompactLayer]:
    """Layers of a cache, or what its layers will be if it makes them when they are needed."""
    return cache.layers or [cache.layer_class_to_replicate()]


def _alike(layer: Any, wanted: CompactLayer) -> bool:
    return type(layer) is type(wanted) and layer.settings() == wanted.settings()


def _without_temporary_cache(module: nn.Module, args: tuple, call: Call, output: Any) -> Any:
    """Output without a cache that nobody asked for: `generate(use_cache=False)` would go on from it."""
    cache = call.get("past_key_values")
    if not getattr(cache, "temporary", False):
        return output
    if isinstance(output, tuple):
        return tuple(part for part in output if part is not cache)
    if isinstance(output, Tensor):
        return output
    return type(output)(**{name: part for name, part in output.items() if part is not cache})
