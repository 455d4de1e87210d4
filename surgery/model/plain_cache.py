"""Cache layer of all tokens in the model's dtype, for caches with layers of different kinds.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .cache_layer import CompactLayer
from .growing import append


class PlainLayer(CompactLayer, DynamicLayer):
    """Unquantized cache of one layer or of some of its heads: transformers' `DynamicLayer` as a `CompactLayer`."""

    form = "keys and values of all tokens"

    def settings(self) -> tuple:
        """Return no settings."""
        return ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, heads, head sizes, dtype and device from the first tokens."""
        self.device = key_states.device
        # Separate dtypes: under autocast rotated keys may be wider than values.
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, n, d]; return those of all tokens [B, H, T, d]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = append(self.keys, key_states, capacity=self.reserved)
        self.values = append(self.values, value_states, capacity=self.reserved)
        return self.keys, self.values

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Predict the bytes of `tokens` tokens."""
        return batch * heads * tokens * (key_dim + value_dim) * dtype.itemsize

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
