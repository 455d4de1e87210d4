"""Base of cache layers that keep keys and values in another form than plain tensors of all tokens.

And how a decoder comes to use them: hooks see every call of it, of the causal model, of `generate` and of the decoder
alone. Without a cache to keep (`use_cache=False`) the decoder gets one for that call only, because attention must read
what the cache would give.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicSlidingWindowLayer

from .cache_argument import CACHE, rename_cache

WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Fields of a config with the tokens that such a layer sees."""

Call = dict[str, Any]
"""Arguments of one call of a decoder, by name."""


class CompactLayer(CacheLayerMixin):
    """A layer that cannot be cropped or offloaded and takes any number of tokens.

    Subclasses say how their tensors change when rows of the batch are repeated, dropped or reordered, by `_map_rows`.

    Attributes:
        form: what the layer keeps, for error messages.
        reads_ahead: whether one pass over a text is another function than decoding it.
        keys, values: the tokens kept as they came [B, H, n, head_dim], in the model's dtype; None before the first.
        reserved: tokens that memory is allocated for at once, see `reserve`.
    """

    form: ClassVar[str]
    reads_ahead: ClassVar[bool] = False
    is_sliding = False
    is_croppable = False
    reserved = 0

    def settings(self) -> tuple:
        """Return the settings that two layers of one class must share to be interchangeable."""
        raise NotImplementedError

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that the layer will hold after `tokens` tokens [batch, heads, tokens, key_dim or value_dim]."""
        raise NotImplementedError

    def updates(self, cached: Any, past_length: int, new: int) -> Iterator[int]:
        """Bytes after each `update` by which `new` tokens enter after `past_length`, its results included.

        `cached` is the `CachedLayer` of an empty layer, see `cache_prediction`.
        """
        raise ValueError(f"the peak of {self.form} cannot be predicted: measure it")

    def reserve(self, tokens: int) -> None:
        """Allocate memory for that many tokens in all when the first come, so that no step has to move any."""
        self.reserved = tokens

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change`, which acts on dimension 0, to everything kept for each row of the batch."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows at `indices`."""
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that `query_length` more tokens will see, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: any number of tokens may come."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError unless there is nothing to take back: what was given up to save memory is gone."""
        if tokens_to_remove:
            raise ValueError(
                f"{self.form} cannot take tokens back, as assisted and speculative decoding need: decode without them"
            )

    def offload(self) -> None:
        """Raises ValueError."""
        raise ValueError(f"{self.form} cannot be offloaded: use a cache without offloading")


CacheLayer = CompactLayer | DynamicSlidingWindowLayer
"""A layer of a cache in another form: of converted attention, or of a layer with a window, which stays unchanged."""


def check_full_attention(config: PreTrainedConfig, form: str, unchanged: Collection[int] = ()) -> None:
    """Raises ValueError unless every layer of a model attends to all earlier tokens.

    Layers with a window or a recurrent state keep something else than the keys and values of all tokens. Those of
    `unchanged` may have a window.
    """
    config = config.get_text_config(decoder=True)
    kinds = dict(enumerate(getattr(config, "layer_types", None) or ()))
    if not kinds and getattr(config, "sliding_window", None) is not None:
        kinds = {0: "sliding_attention"}
    for layer, kind in kinds.items():
        if kind != "full_attention" and (layer not in unchanged or kind not in WINDOWS):
            raise ValueError(f"{form} needs full attention in every layer; layer {layer} is of {kind}")


def is_empty(cache: Any) -> bool:
    """Return whether no layer of a cache has seen a token."""
    return all(not layer.is_initialized or layer.get_seq_length() == 0 for layer in cache.layers)


def adopt(cache: Cache | None, layers: list[CacheLayer]) -> Cache:
    """The cache that a model goes on with, whose layers are such as `layers`, one for each layer of the model.

    None becomes a new cache of `layers`. An empty `DynamicCache`, as `generate` makes it, gets `layers` itself, so that
    whoever holds it holds the filled cache. One of the right layers is continued.

    Raises:
        ValueError: a cache of another kind.
    """
    if cache is None:
        return Cache(layers=layers)
    if isinstance(cache, Cache) and not cache.offloading:
        # A cache may make its layers when they are needed.
        cached = cache.layers or [cache.layer_class_to_replicate()] * len(layers)
        if len(cached) == len(layers) and all(map(_alike, cached, layers)):
            return cache
        if type(cache) is DynamicCache and is_empty(cache):
            cache.layers, cache.layer_class_to_replicate = layers, None
            return cache
    form = next(layer.form for layer in layers if isinstance(layer, CompactLayer))
    raise ValueError(
        f"this model keeps {form} and was given a {type(cache).__name__} that it cannot continue: "
        "pass none, an empty DynamicCache without offloading, or the cache that it returned"
    )


def keeps_cache(decoder: nn.Module, call: Call) -> bool:
    """Return whether the caller of a decoder has given a cache or wants one back."""
    use_cache = call.get("use_cache")
    use_cache = getattr(decoder.config, "use_cache", True) if use_cache is None else use_cache
    return bool(use_cache) or call.get(CACHE) is not None


def own_cache(decoder: nn.Module, call: Call, layers: list[CacheLayer]) -> Cache:
    """Puts into `call` the cache that `adopt` gives, for this call alone if none is kept; returns it.

    Raises:
        ValueError: the call comes with a cache of another kind.
    """
    keeps = keeps_cache(decoder, call)
    cache = call[CACHE] = adopt(call.get(CACHE), layers)
    cache.temporary = not keeps
    return cache


def hook_calls(decoder: nn.Module, prepare: Callable[[nn.Module, Call], None]) -> None:
    """Let `prepare(decoder, call)` change the arguments of every call of a decoder.

    A temporary cache of `own_cache` is taken out of what the decoder returns. The decoder can be copied and pickled if
    `prepare` can.
    """
    names = list(inspect.signature(decoder.forward).parameters)
    decoder.register_forward_pre_hook(partial(_before, names, prepare), with_kwargs=True, prepend=True)
    decoder.register_forward_hook(_without_temporary_cache, with_kwargs=True)


def _before(
    names: list[str], prepare: Callable[[nn.Module, Call], None], module: nn.Module, args: tuple, kwargs: Call
) -> tuple[tuple, Call]:
    call = rename_cache(dict(zip(names, args, strict=False)) | kwargs)
    prepare(module, call)
    return (), call


def _without_temporary_cache(module: nn.Module, args: tuple, call: Call, output: Any) -> Any:
    """Output without a cache that nobody asked for: `generate(use_cache=False)` would go on from it."""
    cache = call.get(CACHE)
    if not getattr(cache, "temporary", False):
        return output
    if isinstance(output, tuple):
        return tuple(part for part in output if part is not cache)
    if isinstance(output, Tensor):
        return output
    return type(output)(**{name: part for name, part in output.items() if part is not cache})


def _alike(layer: Any, expected: CacheLayer) -> bool:
    if not isinstance(expected, CompactLayer):
        return type(layer) is type(expected) and layer.sliding_window == expected.sliding_window
    return isinstance(layer, type(expected)) and layer.settings() == expected.settings()
