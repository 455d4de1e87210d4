"""Randomly filled caches for benchmarks; of fixed length for plain keys and values and for packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from surgery.model.cache_argument import CACHE, returned_cache
from surgery.model.left_padding import LeftPadding
from surgery.model.token_cache import TokenCacheLayer

CHUNK = 2048
"""Tokens per prefill chunk when a model fills its cache."""


class SteadyLayer(DynamicLayer):
    """Keys and values of a fixed number of tokens, allocated once, with one slot at the end for the newest token.

    Each step overwrites that slot and reads everything, without the copy of a growing cache. So a CUDA graph of the
    step can be replayed.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Wrap keys and values [B, H, S + 1, ·]; the last slot is overwritten."""
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write one token [B, H, 1, ·] and return all tokens."""
        self.keys[:, :, -1:].copy_(key_states)
        self.values[:, :, -1:].copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens before the newest."""
        return self.keys.shape[-2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a step sees, and the position of the first."""
        return self.keys.shape[-2], 0


class SteadyRows(TokenCacheLayer):
    """Packed rows of a fixed number of tokens with one slot for the newest, as in :class:`SteadyLayer`."""

    def __init__(self, layer: TokenCacheLayer, rows: Tensor, first_values: Tensor) -> None:
        """Wrap `rows` [B, 1, S + 1, ·] uint8 and the first tokens' values, with the settings of `layer`."""
        super().__init__(*layer.settings())
        self.keys, self.values, self.is_initialized = rows, first_values, True
        self.padding = LeftPadding([0] * len(rows))

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write one row [B, 1, 1, ·] and return all rows."""
        self.keys[:, :, -1:].copy_(key_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens before the newest."""
        return self.keys.shape[-2] - 1


@torch.no_grad()
def filled_cache(
    model, batch: int, context: int, device: torch.device, steps: int = 0, *, growing: bool = False
) -> Any:
    """Return a model's cache with `context` random tokens in each of `batch` rows.

    Plain keys and values and packed rows are filled with random values, without a forward pass, and do not grow: see
    :class:`SteadyLayer`. Every other cache (quantized values, windows, latents shared by layers) is filled by a prefill
    of random tokens and grows with every step, in memory reserved for `steps` steps. With `growing` every cache does,
    as in `generate`, without reserved memory.
    """
    if not growing and is_steady(model, device):
        return _steady_cache(model, batch, context, device)
    generator = torch.Generator(device=device).manual_seed(0)
    reserves = not growing and hasattr(model, "reserved_cache")
    cache = model.reserved_cache(context + steps) if reserves else None
    for first in range(0, context, CHUNK):
        length = min(CHUNK, context - first)
        tokens = torch.randint(model.config.vocab_size, (batch, length), device=device, generator=generator)
        cache = returned_cache(model(tokens, use_cache=True, logits_to_keep=1, **{CACHE: cache}))
    return cache


@torch.no_grad()
def is_steady(model, device: torch.device) -> bool:
    """Return whether all layers cache plain keys and values of all tokens, or packed rows."""
    layers = getattr(_probe(model, 1, device), "layers", [])
    return bool(layers) and all(type(layer) in (DynamicLayer, TokenCacheLayer) for layer in layers)


def _probe(model, batch: int, device: torch.device) -> Any:
    """Return the cache after one token."""
    return returned_cache(model(torch.zeros(batch, 1, dtype=torch.long, device=device), use_cache=True))


def _steady_cache(model, batch: int, context: int, device: torch.device) -> DynamicCache:
    generator = torch.Generator(device=device).manual_seed(0)
    probe = _probe(model, batch, device)
    cache = DynamicCache()
    cache.layers = [_steady_layer(layer, context + 1, generator) for layer in probe.layers]
    return cache


def _steady_layer(layer: Any, tokens: int, generator: torch.Generator) -> SteadyLayer | SteadyRows:
    """Build a layer like `layer` with `tokens` slots of random keys and values, or random rows."""
    if isinstance(layer, TokenCacheLayer):
        first_values = torch.empty_like(layer.values).normal_(0.0, 1.0, generator=generator)
        rows = _buffer(layer.keys, tokens).random_(0, 256, generator=generator)
        return SteadyRows(layer, rows, first_values)
    return SteadyLayer(
        *(_buffer(part, tokens).normal_(0.0, 1.0, generator=generator) for part in (layer.keys, layer.values))
    )


def _buffer(like: Tensor, tokens: int) -> Tensor:
    return like.new_empty(*like.shape[:2], tokens, like.shape[-1])
