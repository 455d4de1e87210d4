"""The cache of all tokens in the model's dtype, next to layers in other forms.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .cache_layer import CompactLayer
from .growing import append


class PlainLayer(CompactLayer, DynamicLayer):
    """The cache of one layer, or of some of its heads, in the model's dtype: transformers' own, in a mixed cache."""

    form = "keys and values of all tokens"

    def settings(self) -> tuple:
        """Nothing to set."""
        return ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes batch, heads, head sizes, dtype and device from the first tokens."""
        self.device = key_states.device
        # Of a dtype each: under autocast rotated keys may be wider than values.
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Adds tokens [B, H, n, d] and returns those of all tokens [B, H, T, d]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = append(self.keys, key_states, capacity=self.reserved)
        self.values = append(self.values, value_states, capacity=self.reserved)
        return self.keys, self.values

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of `tokens` tokens."""
        return batch * heads * tokens * (key_dim + value_dim) * dtype.itemsize

    def updates(self, cached: Any, past_length: int, new: int) -> Iterator[int]:
        """Bytes after an update, whose results are views of the cache."""
        yield cached.held(past_length + new)

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
