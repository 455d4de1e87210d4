"""Base class of cache layers that hold something else than plain keys and values of all tokens.

Hooks install such layers in every call of the decoder, whether by the causal model, by `generate` or directly. With
`use_cache=False` the decoder gets a temporary cache for that call, because attention must read the values as the cache
would return them.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicSlidingWindowLayer

from .cache_argument import CACHE, rename_cache

WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Config field with the window length in tokens, by layer type."""

Call = dict[str, Any]
"""Arguments of one call of a decoder, by name."""


class CompactLayer(CacheLayerMixin):
    """Base class of cache layers of any length that cannot be cropped or offloaded.

    Subclasses implement `_map_rows`, by which batch rows are repeated, dropped or reordered.

    Attributes:
        form: description of the contents, for error messages.
        reads_ahead: whether one pass over a text computes something else than decoding it token by token.
        keys, values: unquantized tokens [B, H, n, head_dim] in the model's dtype; None before the first token.
        reserved: tokens to allocate memory for at once, see `reserve`.
    """

    form: ClassVar[str]
    reads_ahead: ClassVar[bool] = False
    is_sliding = False
    is_croppable = False
    reserved = 0

    def settings(self) -> tuple:
        """Return the settings in which two layers of one class must agree to be interchangeable."""
        raise NotImplementedError

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Predict the bytes of the layer after `tokens` tokens [batch, heads, tokens, key_dim or value_dim]."""
        raise NotImplementedError

    def reserve(self, tokens: int) -> None:
        """Have the first update allocate memory for `tokens` tokens in all, so that no step copies the cache."""
        self.reserved = tokens

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, which acts on dimension 0, to all tensors with a batch dimension."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Replace row i by row `beam_idx[i]`."""
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, copies adjacent."""
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows at `indices`."""
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys for `query_length` new tokens, and the position of the first key."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length is unlimited."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError unless `tokens_to_remove` is 0: dropped or quantized tokens cannot be restored."""
        if tokens_to_remove:
            raise ValueError(
                f"{self.form} cannot be cropped, as assisted and speculative decoding require; decode without them"
            )

    def offload(self) -> None:
        """Raise ValueError: offloading is not supported."""
        raise ValueError(f"{self.form} cannot be offloaded; use a cache without offloading")


CacheLayer = CompactLayer | DynamicSlidingWindowLayer
"""Cache layer of converted attention, or of an unchanged layer with a sliding window."""


@dataclass(frozen=True)
class CachedLayer:
    """One cache layer and the shape of a token in it.

    Attributes:
        layer: empty cache layer.
        batch: batch size.
        heads, key_dim, value_dim: number of heads and their widths, per token.
        dtype: dtype of the model.
    """

    layer: CacheLayerMixin
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of every row, unquantized."""
        return self.batch * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def held(self, tokens: int) -> int:
        """Return the bytes of the layer after `tokens` tokens of every row."""
        if isinstance(self.layer, CompactLayer):
            size = {"batch": self.batch, "heads": self.heads, "key_dim": self.key_dim, "value_dim": self.value_dim}
            return self.layer.predicted_bytes(tokens, **size, dtype=self.dtype)
        # A full window holds one token less than a query sees: the query's own token is new.
        return self.token_bytes * (min(tokens, self.layer.sliding_window - 1) if self.layer.is_sliding else tokens)


def check_full_attention(config: PreTrainedConfig, form: str, unchanged: Collection[int] = ()) -> None:
    """Raise ValueError unless every layer of a model has full attention.

    Layers with a window or a recurrent state do not keep the keys and values of all tokens. Layers whose index is in
    `unchanged` may have a window.
    """
    config = config.get_text_config(decoder=True)
    kinds = dict(enumerate(getattr(config, "layer_types", None) or ()))
    if not kinds and getattr(config, "sliding_window", None) is not None:
        kinds = {0: "sliding_attention"}
    for layer, kind in kinds.items():
        if kind != "full_attention" and (layer not in unchanged or kind not in WINDOWS):
            raise ValueError(f"{form} needs full attention in every layer; layer {layer} has {kind}")


def is_empty(cache: Any) -> bool:
    """Return whether no layer of a cache holds tokens."""
    return all(not layer.is_initialized or layer.get_seq_length() == 0 for layer in cache.layers)


def adopt(cache: Cache | None, layers: list[CacheLayer]) -> Cache:
    """Return a cache for a model whose cache layers are like `layers`, one per layer of the model.

    None becomes a new cache of `layers`. An empty `DynamicCache`, as `generate` makes it, receives `layers` in place,
    so that its owner holds the filled cache. A cache with equivalent layers is returned as is.

    Raises:
        ValueError: any other cache.
    """
    if cache is None:
        return Cache(layers=layers)
    if isinstance(cache, Cache) and not cache.offloading:
        # transformers may create layers lazily.
        cached = cache.layers or [cache.layer_class_to_replicate()] * len(layers)
        if len(cached) == len(layers) and all(map(equivalent, cached, layers)):
            return cache
        if type(cache) is DynamicCache and is_empty(cache):
            cache.layers, cache.layer_class_to_replicate = layers, None
            return cache
    form = next(layer.form for layer in layers if isinstance(layer, CompactLayer))
    raise ValueError(
        f"this model uses {form} and cannot continue from this {type(cache).__name__}; "
        "pass no cache, an empty DynamicCache without offloading, or the cache that it returned"
    )


def keeps_cache(decoder: nn.Module, call: Call) -> bool:
    """Return whether a call of a decoder passes a cache or requests one (`use_cache`)."""
    use_cache = call.get("use_cache")
    use_cache = getattr(decoder.config, "use_cache", True) if use_cache is None else use_cache
    return bool(use_cache) or call.get(CACHE) is not None


def own_cache(decoder: nn.Module, call: Call, layers: list[CacheLayer]) -> Cache:
    """Store the cache returned by `adopt` in `call` and return it; it is temporary if the caller keeps none.

    Raises:
        ValueError: the call has a cache of another kind.
    """
    keeps = keeps_cache(decoder, call)
    cache = call[CACHE] = adopt(call.get(CACHE), layers)
    cache.temporary = not keeps
    return cache


def hook_calls(decoder: nn.Module, prepare: Callable[[nn.Module, Call], None]) -> None:
    """Let `prepare(decoder, call)` change the arguments of every call of a decoder.

    A temporary cache of `own_cache` is removed from the decoder's output. The decoder can be copied and pickled if
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
    """Remove a temporary cache from a decoder's output; `generate(use_cache=False)` would continue from it."""
    cache = call.get(CACHE)
    if not getattr(cache, "temporary", False):
        return output
    if isinstance(output, tuple):
        return tuple(part for part in output if part is not cache)
    if isinstance(output, Tensor):
        return output
    return type(output)(**{name: part for name, part in output.items() if part is not cache})


def equivalent(layer: Any, expected: CacheLayer) -> bool:
    """Return whether a layer of a cache can serve in place of an expected one."""
    if not isinstance(expected, CompactLayer):
        return type(layer) is type(expected) and layer.sliding_window == expected.sliding_window
    return isinstance(layer, type(expected)) and layer.settings() == expected.settings()
