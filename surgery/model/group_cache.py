"""A cache in which adjacent layers store their tokens together, once a block of tokens is complete.

Positions are places in the cache, from 0 on, padding included. Blocks of C positions begin at multiples of C. A query
at position m reads tokens exactly if they stand in its own block so far, among the last `window` positions (n > m -
window) or among the first `sinks`; all others as the group's store gives them back. What a query reads is so a function
of the text alone, whatever pieces the text comes in, as long as no piece reaches over the end of a block.

Shapes: B batch, T new tokens, S tokens in all, n elements of a token in one layer, W layers of a group.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
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
    """Tokens that the queries of one piece read, and their form: rebuilt ones first, exact ones after them.

    Attributes:
        first: position of the first query.
        queries: how many.
        block_start: of the block that all queries stand in.
        rebuilt: positions [start, stop) that are read from the group's store.
        exact: positions of the tokens that are read exactly, int64, ascending.
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
        """Positions of all keys, int64 [K]; one that some queries read rebuilt and others exactly is there twice."""
        return torch.cat([torch.arange(*self.rebuilt, device=self.exact.device), self.exact])

    def select(self, mask: Tensor | None) -> Tensor | None:
        """The mask over keys [·, 1, T, K] from the one over positions [·, 1, T, S], bool or additive.

        None is one query, or a prompt within the first block, whose keys are its positions in order.
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
    """The cache of one layer of a group.

    Attributes:
        store: what all layers of the group share; the layer at place 0 answers for it.
        place: of the layer in its group, from 0 on.
        block: C; None for one block that is the first piece, whatever its length, and exact tokens after it.
        seen: tokens that have come.
        keys: exact tokens [B, 1, kept, n], see `exact_tokens`.
        values: what every token keeps beside them in this layer [B, 1, S, ·]; zero-width as a rule.
    """

    form = "a cache shared by a group of layers"

    def __init__(self, store: GroupStore, place: int, block: int | None, sinks: int = 0, window: int = 0) -> None:
        """Raises ValueError unless `block` ≥ 1, `sinks` ≥ 0 and `window` ≥ 0."""
        super().__init__()
        if (block is not None and block < 1) or sinks < 0 or window < 0:
            raise ValueError(f"blocks of {block} tokens with {sinks} sinks and a window of {window} are impossible")
        self.store, self.place = store, place
        self.block, self.sinks, self.window = block, sinks, window
        self.seen = 0
        self._first_piece = 0
        self._passing: Tensor | None = None  # tokens that `settle` has to sort, while attention reads them

    def settings(self) -> tuple:
        """Block, sinks, window and those of the store."""
        return self.block, self.sinks, self.window, *self.store.settings()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes batch, widths, dtype and device from the first tokens."""
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def reading(self, queries: int, device: torch.device) -> Reading:
        """Return the reading of the next `queries` tokens, from those that `update` will return and the store."""
        stop = self.seen + queries
        start = self._block_start(self.seen)
        if self.block is not None and stop > start + self.block:
            raise ValueError(f"{queries} tokens from position {self.seen} on reach over a block of {self.block}")
        rebuilt_stop = min(start, stop - self.window)
        sinks = min(self.seen, self.sinks)
        exact = torch.cat(
            [torch.arange(sinks, device=device), torch.arange(self._tail_start(self.seen), stop, device=device)]
        )
        return Reading(
            self.seen, queries, start, self.sinks, self.window, (min(self.sinks, rebuilt_stop), rebuilt_stop), exact
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Adds tokens [B, 1, T, n] and what they keep beside [B, 1, T, ·].

        Returns:
            The exact tokens at the positions of `reading` [B, 1, E, n], and what is kept beside of all [B, 1, S, ·].
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
        self._passing = torch.cat([self.keys, key_states], dim=-2)
        return self._passing, self.values

    def settle(self, encode: Callable[[Tensor], Tensor]) -> None:
        """Hands a block that is complete over to the store, as `encode` gives it, and drops what no query reads.

        To be called after each `update`, once attention has read the tokens.
        """
        complete = self.seen == self._first_piece if self.block is None else self.seen % self.block == 0
        if complete:
            length = self.block or self._first_piece
            tokens = self.keys if self._passing is None else self._passing
            self.store.write(self.place, encode(tokens[..., -length:, :]))
        if self._passing is not None:
            tokens, (sinks, tail) = self._passing, self._kept
            exact = torch.cat([tokens[..., :sinks, :], tokens[..., tokens.shape[-2] - tail :, :]], dim=-2)
            max_tokens = self.reserved if self.block is None else self.sinks + self.window + self.block
            self.keys, self._passing = refill(self.keys, exact, max_size=max_tokens), None

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
        """Bytes that the layer will hold after `tokens` tokens, its group's store counted at place 0.

        Args:
            key_dim: n, of one head; value_dim: what a token keeps beside.
            prompt: tokens of the first piece, all by default; where it is the only block, the rest stay exact.
        """
        if self.block is None:
            stored = tokens if prompt is None else min(prompt, tokens)
            exact = tokens - stored
        else:
            stored = tokens // self.block * self.block
            exact = exact_tokens(tokens, self.block, self.sinks, self.window)
        numbers, indices = heads * (exact * key_dim + tokens * value_dim), 0
        if self.place == 0:
            numbers += self.store.numbers(stored, heads * key_dim)
            indices = self.store.index_bytes(stored)
        return batch * (numbers * dtype.itemsize + indices)

    def reserve(self, tokens: int) -> None:
        """Allocate memory for that many tokens at once, in the group's store too."""
        self.reserved = self.store.reserved = tokens

    def get_seq_length(self) -> int:
        """Tokens that have come."""
        return self.seen

    def reset(self) -> None:
        """Forgets all tokens."""
        self.keys = self.values = self._passing = None
        self.seen = self._first_piece = 0
        self.is_initialized = False
        if self.place == 0:
            self.store.reset()

    def _block_start(self, position: int) -> int:
        if self.block is None:
            return self._first_piece if position and position >= self._first_piece else 0
        return position // self.block * self.block

    @property
    def _kept(self) -> tuple[int, int]:
        """Sinks and later tokens that stay exact after `seen`."""
        return min(self.seen, self.sinks), self.seen - self._tail_start(self.seen)

    def _tail_start(self, length: int) -> int:
        """The first position behind the sinks whose token a query at position `length` or later reads exactly."""
        return max(min(length, self.sinks), min(self._block_start(length), length - self.window + 1))

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
        if self.place == 0:
            self.store.map_rows(change)


def exact_tokens(tokens: int, block: int, sinks: int, window: int) -> int:
    """Exact tokens that each `GroupLayer` keeps after `tokens` tokens, between two forward passes."""
    sink_tokens = min(tokens, sinks)
    return sink_tokens + tokens - max(sink_tokens, min(tokens // block * block, tokens - window + 1))
