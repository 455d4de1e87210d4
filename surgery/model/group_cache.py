"""Cache in which a group of adjacent layers stores tokens together, one complete block of tokens at a time.

Positions are indices in the cache from 0 on, padding included. Blocks of C positions begin at multiples of C. A query
at position m reads in full precision the tokens of its own block, the last `window` tokens (n > m - window) and the
first `sinks`; it reads all others from the group's store. So the keys of a query depend on the text alone, however the
text is split into pieces, as long as no piece crosses the end of a block.

Shapes: B batch, T new tokens, S all tokens, n elements of a token in one layer, W layers of a group.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .cache_layer import CompactLayer
from .group_stores import GroupStore
from .growing import append, refill
from .step_memo import once


@dataclass(frozen=True)
class Reading:
    """Tokens that the queries of one piece read: rebuilt ones first, then full-precision ones.

    Attributes:
        first: position of the first query.
        queries: number of queries.
        block_start: start of the block of all queries.
        rebuilt: range [start, stop) of positions that are read from the group's store.
        exact: positions of the tokens that are read in full precision, int64, ascending.
    """

    first: int
    queries: int
    block_start: int
    sinks: int
    window: int
    rebuilt: tuple[int, int]
    exact: Tensor

    @cached_property
    def positions(self) -> Tensor:
        """Positions of all keys, int64 [K]; twice if some queries read a token rebuilt and others in full precision."""
        return torch.cat([torch.arange(*self.rebuilt, device=self.exact.device), self.exact])

    def select(self, mask: Tensor | None) -> Tensor | None:
        """Convert a mask over positions [·, 1, T, S], bool or additive, to one over keys [·, 1, T, K].

        None stays None: one query, or a prompt within the first block, whose keys are all positions in order.
        """
        if mask is None:
            return None
        key = Reading, self.first, self.queries, self.sinks, self.window
        return once(mask, key, lambda: self._select(mask))

    def _select(self, mask: Tensor) -> Tensor:
        positions = self.positions
        picked = mask[..., positions]
        if self.queries == 1:
            return picked
        query = self.first + torch.arange(self.queries, device=positions.device)[:, None]
        wanted_exact = (positions < self.sinks) | (positions >= self.block_start) | (positions > query - self.window)
        is_exact = torch.arange(len(positions), device=positions.device) >= len(positions) - len(self.exact)
        right_form = wanted_exact == is_exact
        if picked.dtype == torch.bool:
            return picked & right_form
        return picked.masked_fill(~right_form, torch.finfo(picked.dtype).min)


class GroupLayer(CompactLayer):
    """Cache layer of one layer of a group.

    Attributes:
        store: store that all layers of the group share; the layer at index 0 resets and measures it.
        index: index of the layer in its group, from 0 on.
        block: C; None if the first piece is the only block and later tokens stay in full precision.
        seen: number of tokens seen.
        keys: full-precision tokens [B, 1, kept, n], see `exact_tokens`.
        values: further elements of every token in this layer [B, 1, S, ·]; usually of width 0.
    """

    form = "a cache shared by a group of layers"

    def __init__(self, store: GroupStore, index: int, block: int | None, sinks: int = 0, window: int = 0) -> None:
        """Make an empty layer; ValueError unless `block` ≥ 1, `sinks` ≥ 0 and `window` ≥ 0."""
        super().__init__()
        if (block is not None and block < 1) or sinks < 0 or window < 0:
            raise ValueError(f"block must be at least 1, sinks and window at least 0, not {block}, {sinks}, {window}")
        self.store, self.index = store, index
        self.block, self.sinks, self.window = block, sinks, window
        self.seen = 0
        self._first_piece = 0
        self._pending: Tensor | None = None  # tokens of the last update, until `settle`

    def settings(self) -> tuple:
        """Return block, sinks, window and the settings of the store."""
        return self.block, self.sinks, self.window, *self.store.settings()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, widths, dtype and device from the first tokens."""
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def reading(self, queries: int, device: torch.device) -> Reading:
        """Return the `Reading` of the next `queries` tokens; ValueError if they cross the end of a block."""
        stop = self.seen + queries
        start = self._block_start(self.seen)
        if self.block is not None and stop > start + self.block:
            raise ValueError(f"{queries} tokens from position {self.seen} on cross the end of a block of {self.block}")
        rebuilt_stop = min(start, stop - self.window)
        sinks = min(self.seen, self.sinks)
        exact = torch.cat(
            [torch.arange(sinks, device=device), torch.arange(self._tail_start(self.seen), stop, device=device)]
        )
        return Reading(
            self.seen, queries, start, self.sinks, self.window, (min(self.sinks, rebuilt_stop), rebuilt_stop), exact
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append tokens [B, 1, T, n] and their further elements [B, 1, T, ·].

        Returns:
            Full-precision tokens [B, 1, E, n] at the `exact` positions of `reading`, and further elements of all
            tokens [B, 1, S, ·].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.seen == 0:
            self._first_piece = key_states.shape[-2]
        self.seen += key_states.shape[-2]
        self.values = append(self.values, value_states, capacity=self.reserved)
        if self.keys.shape[-2] + key_states.shape[-2] == sum(self._kept):
            self.keys = append(self.keys, key_states, capacity=self.reserved if self.block is None else 0)
            return self.keys, self.values
        self._pending = torch.cat([self.keys, key_states], dim=-2)
        return self._pending, self.values

    def settle(self, encode: Callable[[Tensor], Tensor]) -> None:
        """Write a complete block, encoded by `encode`, to the store, and drop tokens that no later query reads.

        Call it after each `update`, once attention has read the tokens.
        """
        complete = self.seen == self._first_piece if self.block is None else self.seen % self.block == 0
        if complete:
            length = self.block or self._first_piece
            tokens = self.keys if self._pending is None else self._pending
            self.store.write(self.index, encode(tokens[..., -length:, :]))
        if self._pending is not None:
            tokens, (sinks, tail) = self._pending, self._kept
            exact = torch.cat([tokens[..., :sinks, :], tokens[..., tokens.shape[-2] - tail :, :]], dim=-2)
            max_tokens = self.reserved if self.block is None else self.sinks + self.window + self.block
            self.keys, self._pending = refill(self.keys, exact, max_size=max_tokens), None

    def predicted_bytes(
        self,
        tokens: int,
        *,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        prompt: int | None = None,
    ) -> int:
        """Predict the bytes of the layer after `tokens` tokens; the layer at index 0 includes the group's store.

        Args:
            key_dim: n, per head; value_dim: further elements of a token.
            prompt: tokens of the first piece, all by default; if it is the only block, the rest stay in full precision.
        """
        if self.block is None:
            stored = tokens if prompt is None else min(prompt, tokens)
            exact = tokens - stored
        else:
            stored = tokens // self.block * self.block
            exact = exact_tokens(tokens, self.block, self.sinks, self.window)
        numbers, indices = heads * (exact * key_dim + tokens * value_dim), 0
        if self.index == 0:
            numbers += self.store.numbers(stored, heads * key_dim)
            indices = self.store.index_bytes(stored)
        return batch * (numbers * dtype.itemsize + indices)

    def reserve(self, tokens: int) -> None:
        """Have the first update allocate memory for `tokens` tokens, in the group's store too."""
        self.reserved = self.store.reserved = tokens

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.seen

    def reset(self) -> None:
        """Drop all tokens."""
        self.keys = self.values = self._pending = None
        self.seen = self._first_piece = 0
        self.is_initialized = False
        if self.index == 0:
            self.store.reset()

    def _block_start(self, position: int) -> int:
        if self.block is None:
            return self._first_piece if position and position >= self._first_piece else 0
        return position // self.block * self.block

    @property
    def _kept(self) -> tuple[int, int]:
        """Numbers of sinks and of later tokens that stay in full precision after `seen` tokens."""
        return min(self.seen, self.sinks), self.seen - self._tail_start(self.seen)

    def _tail_start(self, length: int) -> int:
        """Return the first position after the sinks that queries from `length` on read in full precision."""
        return max(min(length, self.sinks), min(self._block_start(length), length - self.window + 1))

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
        if self.index == 0:
            self.store.map_rows(change)


def exact_tokens(tokens: int, block: int, sinks: int, window: int) -> int:
    """Return how many of `tokens` tokens a `GroupLayer` keeps in full precision between forward passes."""
    sink_tokens = min(tokens, sinks)
    return sink_tokens + tokens - max(sink_tokens, min(tokens // block * block, tokens - window + 1))
