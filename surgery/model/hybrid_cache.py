"""Cache of a layer with full heads, which keep all tokens, and streaming heads, which keep sinks and a window.

Retrieval heads and streaming heads as in DuoAttention (Xiao et al., arXiv:2410.10819); any number of heads may stream.
In a streaming head the query at position q sees the key at position p ≤ q if q - p < `recent` or p - padding < `sinks`.
Keys keep the rotation of their own position. So a plain forward pass with that mask, a prefill in any chunks and
decoding compute the same function.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import BoolTensor, Tensor

from .cache_layer import CompactLayer
from .left_padding import LeftPadding
from .sink_window_cache import SinkWindowLayer

PIECE = 256
"""Least number of tokens per piece in streaming heads; smaller pieces would make many small matrix products."""


class Piece(NamedTuple):
    """A piece of new tokens, with the keys and values that its queries attend to.

    Attributes:
        tokens: slice of the new tokens.
        slots: positions of the keys in each row [B, K], padding included; arbitrary for hidden keys; None if not
            requested.
        visible: mask of the keys that each query sees [B, 1, n, K], bool.
        keys, values: keys and values returned by the layer [B, H, K, d].
    """

    tokens: slice
    slots: Tensor | None
    visible: BoolTensor
    keys: Tensor
    values: Tensor


class StreamingLayer(SinkWindowLayer):
    """Sinks and window of all streaming heads of a layer.

    With `codes` (`TokenCodes`) each token is quantized on arrival and read quantized, already in the pass that adds it.
    `keys` and `sink_keys` then hold the packed codes of keys and values; `values` and `sink_values` hold scales and
    zero points.
    """

    form = "a cache of streaming heads"

    def __init__(self, sinks: int, recent: int, codes: Any = None) -> None:
        """Make an empty layer; ValueError unless `sinks` ≥ 0 and `recent` ≥ 1."""
        super().__init__(sinks, recent)
        self.codes = codes

    def settings(self) -> tuple:
        """Return sinks, recent and the settings of the quantization."""
        return self.sinks, self.recent, self.codes and self.codes.settings()

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Predict the bytes after `tokens` tokens, if at least one row has no padding."""
        if not tokens:
            return 0
        if self.codes is None:
            token = (key_dim + value_dim) * dtype.itemsize
        else:
            token = self.codes.token_bytes(key_dim, dtype) + self.codes.token_bytes(value_dim, dtype)
        return batch * heads * self.kept(tokens) * token

    def kept(self, tokens: int) -> int:
        """Return the number of tokens held after `tokens` tokens were seen."""
        return min(tokens, self.sinks + self.recent - 1)

    @property
    def piece(self) -> int:
        """Number of tokens per piece of `pieces`."""
        return max(PIECE, self.sinks + self.recent)

    def pieces(self, key_states: Tensor, value_states: Tensor, *, with_slots: bool = False) -> Iterator[Piece]:
        """Append tokens [B, H, T, d] and yield them in pieces, so that time and memory are O(T · window)."""
        for first in range(0, key_states.shape[-2], self.piece):
            tokens = slice(first, first + self.piece)
            keys, values = key_states[..., tokens, :], value_states[..., tokens, :]
            slots = self.slots(keys.shape[-2], keys.device) if with_slots else None
            visible = self.visible(keys.shape[-2], keys.device)
            yield Piece(tokens, slots, visible, *self.update(keys, values))

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append tokens [B, H, n, d]; return sinks, window and new tokens [B, H, s + w + n, d], masked by `visible`."""
        if self.codes is None:
            return super().update(key_states, value_states)
        # Codes of keys and values as keys, scales and zero points as values.
        (key_codes, key_numbers), (value_codes, value_numbers) = map(self.codes.encode, (key_states, value_states))
        codes, numbers = super().update(
            torch.cat([key_codes, value_codes], dim=-1), torch.cat([key_numbers, value_numbers], dim=-1)
        )
        first, second = key_codes.shape[-1], key_numbers.shape[-1]
        keys = self.codes.decode(codes[..., :first], numbers[..., :second], key_states.shape[-1])
        return keys, self.codes.decode(codes[..., first:], numbers[..., second:], value_states.shape[-1])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask sizes over all tokens, for other layers; streaming heads use `visible`."""
        return self.seen + query_length, 0


class HybridLayer(CompactLayer):
    """Cache layer of two parts, which attention updates separately.

    Attributes:
        full: layer of the heads or latents that keep all tokens, or None.
        streaming: layer of the heads or latents that keep sinks and a window, or None.
    """

    form = "a cache of full and streaming heads"

    def __init__(
        self, full: CompactLayer | None, streaming: StreamingLayer | None, *, heads: int = 0, width: int = 0
    ) -> None:
        """Make the first `heads` KV heads full, or the first `width` elements of the keys of the only head.

        Raises:
            ValueError: both parts are None.
        """
        if full is None and streaming is None:
            raise ValueError("a hybrid layer needs full or streaming heads")
        self.full, self.streaming = full, streaming
        self.full_heads, self.full_width = heads, width
        self.keys = self.values = None  # they are in the parts

    @property
    def parts(self) -> list[CompactLayer]:
        """Parts that are not None."""
        return [part for part in (self.full, self.streaming) if part is not None]

    @property
    def is_initialized(self) -> bool:
        """True if a part holds tokens."""
        return any(part.is_initialized for part in self.parts)

    @property
    def reads_ahead(self) -> bool:
        """True if one pass over a text differs from decoding it token by token."""
        return any(part.reads_ahead for part in self.parts)

    @property
    def padding(self) -> LeftPadding | None:
        """Left padding of each row, which only a streaming part needs."""
        return self.streaming and self.streaming.padding

    @padding.setter
    def padding(self, padding: LeftPadding | None) -> None:
        if self.streaming is not None:
            self.streaming.padding = padding

    def settings(self) -> tuple:
        """Return the settings of both parts, and the split of heads or elements."""
        settings = (part and (type(part), *part.settings()) for part in (self.full, self.streaming))
        return *settings, self.full_heads, self.full_width

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Predict the bytes of both parts after `tokens` tokens [batch, heads, tokens, key_dim or value_dim]."""
        total = 0
        for part in self.parts:
            size = {"batch": batch, "heads": heads, "key_dim": key_dim, "value_dim": value_dim, "dtype": dtype}
            name, own = ("key_dim", self.full_width) if self.full_width else ("heads", self.full_heads)
            size[name] = own if part is self.full else size[name] - own
            total += part.predicted_bytes(tokens, **size)
        return total

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raise ValueError: the parts initialize themselves."""
        self.update(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Raise ValueError: attention updates the parts."""
        raise ValueError(f"{self.form} has no update of its own; attention updates its parts")

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.parts[-1].get_seq_length()

    def reserve(self, tokens: int) -> None:
        """Have the parts allocate memory for `tokens` tokens."""
        for part in self.parts:
            part.reserve(tokens)

    def reset(self) -> None:
        """Drop all tokens."""
        for part in self.parts:
            part.reset()

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for part in self.parts:
            part._map_rows(change)
