"""The cache of a layer whose heads differ: some keep all tokens, the others the first few and a window.

Retrieval heads and streaming heads as in DuoAttention (Xiao et al., arXiv:2410.10819), any share of them streaming,
none and all included. A streaming head's query at place q sees the key at place p ≤ q if q - p < `recent` or
p - padding < `sinks`, from the first token on; keys keep the rotation of their own position. So a plain forward pass
with that mask, a prefill in any chunks and decoding are one function.

A compensated head sees one pair more: the means of the keys and of the values that the query no longer sees, with the
logarithm of their number added to the logit (Tang et al., RazorAttention, arXiv:2407.15891, section 3.3).

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import BoolTensor, Tensor

from .cache_layer import CompactLayer
from .growing import refill
from .left_padding import LeftPadding
from .sink_window_cache import SinkWindowLayer
from .step_memo import once

PIECE = 256
"""Tokens that streaming heads take at once, at least: fewer would be many small products."""


class Dropped(NamedTuple):
    """Pairs that the queries of one piece no longer see.

    Attributes:
        keys, values: means [B, Hc, n, d] of each query's dropped tokens, in fp32 at least; 0 where there are none.
        count: how many they are, int64 [B, n].
    """

    keys: Tensor
    values: Tensor
    count: Tensor


class Piece(NamedTuple):
    """New tokens on their way through a `StreamingLayer`.

    Attributes:
        tokens: which of the new ones.
        slots: places of the keys in each row [B, K], padding counted, if asked for; of those that nobody sees, any.
        visible: which keys each query sees [B, 1, n, K], bool.
        keys, values: what the layer returned [B, H, K, d].
    """

    tokens: slice
    slots: Tensor | None
    visible: BoolTensor
    keys: Tensor
    values: Tensor


class StreamingLayer(SinkWindowLayer):
    """Sinks and a window of all heads that stream, as `SinkWindowLayer` keeps them, and sums of what it dropped.

    With `codes` (`TokenCodes`) each token is quantized when it comes and read quantized from then on, in the pass that
    brings it as well; `keys` and `sink_keys` are then codes of keys and values, `values` and `sink_values` what scales
    them.

    Attributes:
        key_sums, value_sums: of the dropped tokens of the last `compensated` heads [B, Hc, d], in fp32 at least, of
            keys and values as they were read; None without such heads or tokens.
    """

    form = "a cache of streaming heads"

    def __init__(self, sinks: int, recent: int, compensated: int = 0, codes: Any = None) -> None:
        """Raises ValueError unless `sinks` ≥ 0, `recent` ≥ 1 and `compensated` ≥ 0."""
        super().__init__(sinks, recent)
        if compensated < 0:
            raise ValueError(f"{compensated} compensated heads are impossible")
        self.compensated, self.codes = compensated, codes
        self.key_sums: Tensor | None = None
        self.value_sums: Tensor | None = None
        self._dropped: Dropped | None = None

    def settings(self) -> tuple:
        """Sinks, recent, how many heads are compensated, and how tokens are quantized."""
        return self.sinks, self.recent, self.compensated, self.codes and self.codes.settings()

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes after `tokens` tokens of rows of which one at least has no padding."""
        if not tokens:
            return 0
        if self.codes is None:
            token = (key_dim + value_dim) * dtype.itemsize
        else:
            token = self.codes.token_bytes(key_dim, dtype) + self.codes.token_bytes(value_dim, dtype)
        return batch * (heads * self.kept(tokens) * token + self.mean_bytes(key_dim, value_dim, dtype))

    def updates(self, cached: Any, past_length: int, new: int) -> Iterator[int]:
        """Bytes after the update of each piece."""
        for first in range(past_length, past_length + new, self.piece):
            last = min(first + self.piece, past_length + new)
            means = cached.batch * self.mean_bytes(cached.key_dim, cached.value_dim, cached.dtype)
            read = cached.token_bytes * (self.kept(first) + last - first) + means * (last - first)
            # The count of a query's dropped tokens is an int64 of each row.
            counts = cached.batch * (last - first) * 8 if self.compensated else 0
            yield cached.held(last) + read + counts

    def mean_bytes(self, key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
        """Bytes of what each query of a row gets of the compensated heads' dropped tokens, and of their sums."""
        return self.compensated * (key_dim + value_dim) * _wide(dtype).itemsize

    @property
    def wide_tensors(self) -> list[Tensor]:
        """Tensors that are held in fp32 at least, whatever the model's dtype."""
        return [] if self.key_sums is None else [self.key_sums, self.value_sums]

    def kept(self, tokens: int) -> int:
        """Tokens held after `tokens` have come."""
        return min(tokens, self.sinks + self.recent - 1)

    @property
    def piece(self) -> int:
        """Tokens that `pieces` takes at once."""
        return max(PIECE, self.sinks + self.recent)

    def pieces(self, key_states: Tensor, value_states: Tensor, *, with_slots: bool = False) -> Iterator[Piece]:
        """Adds tokens [B, H, T, d] piece by piece, so that T may be long: time and memory are O(T · window)."""
        for first in range(0, key_states.shape[-2], self.piece):
            tokens = slice(first, first + self.piece)
            keys, values = key_states[..., tokens, :], value_states[..., tokens, :]
            slots = self.slots(keys.shape[-2], keys.device) if with_slots else None
            visible = self.visible(keys.shape[-2], keys.device)
            yield Piece(tokens, slots, visible, *self.update(keys, values))

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Adds tokens [B, H, n, d] and returns sinks, window and these [B, H, s + w + n, d]; see `visible`."""
        start, first = self.window_start, self.seen
        if self.codes is None:
            keys, values = super().update(key_states, value_states)
        else:
            keys, values = self._update_codes(key_states, value_states)
        if self.compensated:
            self._dropped = self._drop(keys, values, start, first)
        return keys, values

    def _update_codes(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """`update` of a layer that keeps codes of keys and values as its keys, and what scales them as its values."""
        (key_codes, key_numbers), (value_codes, value_numbers) = map(self.codes.encode, (key_states, value_states))
        codes, numbers = super().update(
            torch.cat([key_codes, value_codes], dim=-1), torch.cat([key_numbers, value_numbers], dim=-1)
        )
        first, second = key_codes.shape[-1], key_numbers.shape[-1]
        keys = self.codes.decode(codes[..., :first], numbers[..., :second], key_states.shape[-1])
        return keys, self.codes.decode(codes[..., first:], numbers[..., second:], value_states.shape[-1])

    def take_dropped(self) -> Dropped:
        """Return the pairs that the queries of the last `update` no longer see; may be taken once."""
        dropped, self._dropped = self._dropped, None
        return dropped

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of the mask over all tokens, for other layers: this one has its own, see `visible`."""
        return self.seen + query_length, 0

    def reset(self) -> None:
        """Forgets all tokens."""
        super().reset()
        self.key_sums = self.value_sums = self._dropped = None

    def _drop(self, keys: Tensor, values: Tensor, start: int, first: int) -> Dropped:
        """Adds to the sums what left the window; the queries stand at `first`, …, and see what `update` returned.

        `keys` and `values` [B, H, K, d] are sinks and then the tokens from place `start` on.
        """
        offset = keys.shape[-2] - (self.seen - start)
        leaving = self.window_start - start
        rows = self.padding.on(keys.device)

        def counts() -> tuple[Tensor, Tensor, Tensor]:
            """Return which leaving tokens count, how many of them each query no longer sees, and how many of all."""
            places = start + torch.arange(leaving, device=keys.device)
            own = torch.arange(first, self.seen, device=keys.device)
            count = (own + 1 - self.recent - self.sinks - rows[:, None]).clamp(min=0)
            counted = (places >= rows[:, None] + self.sinks)[:, None, :, None]
            return counted, (own - self.recent + 1 - start).clamp(min=0), count

        key = StreamingLayer._drop, self.sinks, self.recent, start, leaving, self.seen
        counted, indices, count = once(rows, key, counts, step=first)
        means, sums = [], []
        for tokens, before in ((keys, self.key_sums), (values, self.value_sums)):
            tokens = tokens[:, -self.compensated :, offset : offset + leaving].to(_wide(tokens.dtype))
            if before is None:
                before = tokens.new_zeros(*tokens.shape[:2], tokens.shape[-1])
            running = torch.cat([before[..., None, :], tokens * counted], dim=-2).cumsum(dim=-2)
            sums.append(refill(before, running[..., -1, :], dim=-1, max_size=tokens.shape[-1]))
            means.append(running[..., indices, :] / count.clamp(min=1)[:, None, :, None])
        self.key_sums, self.value_sums = sums
        return Dropped(*means, count)

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map_rows(change)
        if self.key_sums is not None:
            self.key_sums, self.value_sums = change(self.key_sums), change(self.value_sums)


class HybridLayer(CompactLayer):
    """The cache of one layer in two parts, which attention fills and reads apart by their own `update`.

    Attributes:
        full: of what keeps all tokens; None if nothing does.
        streaming: of what keeps sinks and a window; None if nothing does.
    """

    form = "a cache of full and streaming heads"

    def __init__(
        self, full: CompactLayer | None, streaming: StreamingLayer | None, *, heads: int = 0, width: int = 0
    ) -> None:
        """Make the first `heads` of each token's KV heads full; or the first `width` elements of its only head's keys.

        Raises:
            ValueError: neither part.
        """
        if full is None and streaming is None:
            raise ValueError("a hybrid layer without heads is impossible")
        self.full, self.streaming = full, streaming
        self.full_heads, self.full_width = heads, width
        self.keys = self.values = None  # they are in the parts

    @property
    def parts(self) -> list[CompactLayer]:
        """Existing parts."""
        return [part for part in (self.full, self.streaming) if part is not None]

    @property
    def is_initialized(self) -> bool:
        """Whether a token has come."""
        return any(part.is_initialized for part in self.parts)

    @property
    def reads_ahead(self) -> bool:
        """Whether one pass over a text is another function than decoding it."""
        return any(part.reads_ahead for part in self.parts)

    @property
    def padding(self) -> LeftPadding | None:
        """Number of padding tokens at the start of each row; only a streaming part asks."""
        return self.streaming and self.streaming.padding

    @padding.setter
    def padding(self, padding: LeftPadding | None) -> None:
        if self.streaming is not None:
            self.streaming.padding = padding

    def settings(self) -> tuple:
        """Return the settings of the parts, and what belongs to which."""
        settings = (part and (type(part), *part.settings()) for part in (self.full, self.streaming))
        return *settings, self.full_heads, self.full_width

    def part_sizes(self, heads: int, key_dim: int, value_dim: int) -> Iterator[tuple[CompactLayer, dict[str, int]]]:
        """The parts, and of a token of those sizes what each gets, as `predicted_bytes` wants it."""
        for part in self.parts:
            is_full = part is self.full
            size = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
            name, own = ("key_dim", self.full_width) if self.full_width else ("heads", self.full_heads)
            size[name] = own if is_full else size[name] - own
            yield part, size

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of both parts after `tokens` tokens [batch, heads, tokens, key_dim or value_dim]."""
        sizes = self.part_sizes(heads, key_dim, value_dim)
        return sum(part.predicted_bytes(tokens, batch=batch, **size, dtype=dtype) for part, size in sizes)

    def updates(self, cached: Any, past_length: int, new: int) -> Iterator[int]:
        """Bytes after the full part's updates, next to what the streaming part held before; then after that one's."""
        parts = [
            replace(cached, layer=part, **size)
            for part, size in self.part_sizes(cached.heads, cached.key_dim, cached.value_dim)
        ]
        for number, part in enumerate(parts):
            others = sum(other.held(past_length + new) for other in parts[:number])
            others += sum(other.held(past_length) for other in parts[number + 1 :])
            yield from (others + part_bytes for part_bytes in part.updates(past_length, new))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Raises ValueError: the parts take theirs from their own first tokens."""
        self.update(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Raises ValueError."""
        raise ValueError(f"{self.form} is filled by the model it belongs to, each part by its own update")

    def get_seq_length(self) -> int:
        """Tokens that have come."""
        return self.parts[-1].get_seq_length()

    def reserve(self, tokens: int) -> None:
        """Let the parts allocate memory for that many tokens."""
        for part in self.parts:
            part.reserve(tokens)

    def reset(self) -> None:
        """Forgets all tokens."""
        for part in self.parts:
            part.reset()

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for part in self.parts:
            part._map_rows(change)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
