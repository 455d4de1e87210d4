"""Cache of packed rows, one per token, with the first tokens in full precision as well.

The first tokens are attention sinks: their keys are far from all others, and nearly every query reads them. They are
the first *real* tokens of each batch row, after left padding, in a separate buffer. Their packed rows are written too,
so that row i is token i. Rows do not depend on each other, so the cache can be cropped, and a chunked prefill gives
the same rows as a single pass.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .cache_layer import CompactLayer
from .growing import append
from .left_padding import LeftPadding
from .token_format import GAIN_BYTES


class TokenCacheLayer(CompactLayer):
    """Cache layer of packed rows.

    Attributes:
        keys: packed rows of all tokens [B, 1, S, row_bytes] uint8.
        values: first tokens in full precision [B, 1, first, channels]; zero until a token arrives.
        padding: left padding of each batch row.
    """

    form = "a cache of packed rows"
    is_croppable = True

    def __init__(self, packed_bytes: int, channels: int, first: int) -> None:
        """Make an empty layer of `packed_bytes` for a token's `channels`; `first` tokens stay in full precision."""
        super().__init__()
        self.packed_bytes, self.channels, self.first = packed_bytes, channels, first
        self.padding: LeftPadding | None = None

    def settings(self) -> tuple:
        """Return bytes and channels of a row, and the number of first tokens."""
        return self.packed_bytes, self.channels, self.first

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Predict the bytes after `tokens` tokens; elements of a token beyond the channels are gains of a key norm."""
        if not tokens:
            return 0
        row_bytes = self.packed_bytes + GAIN_BYTES * (key_dim + value_dim - self.channels)
        return batch * heads * (tokens * row_bytes + self.first * self.channels * dtype.itemsize)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, widths, dtype and device from the first tokens."""
        self.keys = key_states[..., :0, :]
        self.values = value_states.new_zeros((*value_states.shape[:-2], self.first, value_states.shape[-1]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append rows [B, 1, n, row_bytes] of values [B, 1, n, channels]; return all rows, and the first tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past_length = self.keys.shape[-2]
        if self.first and past_length < self.padding.most + self.first:
            self._keep_first(value_states, past_length)
        self.keys = append(self.keys, key_states, capacity=self.reserved)
        return self.keys, self.values

    def _keep_first(self, values: Tensor, past_length: int) -> None:
        """Store new tokens [B, 1, n, channels] that are among the first of their batch row."""
        slots = self._first_slots(values.device) - past_length
        has_come = (slots >= 0) & (slots < values.shape[-2])
        index = slots.clamp(0, values.shape[-2] - 1)[:, None, :, None].expand(-1, 1, -1, values.shape[-1])
        self.values = torch.where(has_come[:, None, :, None], values.gather(-2, index), self.values)

    def _first_slots(self, device: torch.device) -> Tensor:
        """Return the cache indices of the first tokens [B, first]."""
        return self.padding.on(device)[:, None] + torch.arange(self.first, device=device)

    def with_first(self, values: Tensor) -> Tensor:
        """Replace the first tokens in decoded values [B, 1, S, channels] by their full-precision values."""
        reach = min(values.shape[-2], self.padding.most + self.first)
        if not self.first or not reach:
            return values
        position = torch.arange(reach, device=values.device) - self.padding.on(values.device)[:, None]  # [B, reach]
        index = position.clamp(0, self.first - 1)[:, None, :, None].expand(-1, 1, -1, values.shape[-1])
        is_first = ((position >= 0) & (position < self.first))[:, None, :, None]
        head = torch.where(is_first, self.values.gather(-2, index).to(values.dtype), values[..., :reach, :])
        return torch.cat([head, values[..., reach:, :]], dim=-2)

    def get_seq_length(self) -> int:
        """Return the number of cached tokens, padding included."""
        return self.keys.shape[-2] if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens; a positive value is the length to keep, as in older transformers.

        Dropped first tokens are overwritten when new tokens take their positions.
        """
        if self.is_initialized and tokens_to_remove:
            self.keys = self.keys[..., :tokens_to_remove, :]

    def reset(self) -> None:
        """Drop all tokens."""
        self.keys = self.values = self.padding = None
        self.is_initialized = False

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.padding = self.padding.changed(change)
