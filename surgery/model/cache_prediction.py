"""Prediction of a cache's bytes, of the memory to pass tokens through it, and of the attention that is computed.

Closed forms, so that a budget can be judged before a model runs; measurements must agree with them.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin

from .cache_layer import CompactLayer


@dataclass(frozen=True)
class CachedLayer:
    """One layer of a cache and what a token has in it.

    Attributes:
        layer: an empty one.
        batch: rows.
        heads, key_dim, value_dim: of a token.
        dtype: of the model.
    """

    layer: CacheLayerMixin
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of each row as plain numbers."""
        return self.batch * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def held(self, tokens: int) -> int:
        """Bytes after `tokens` tokens of each row."""
        if isinstance(self.layer, CompactLayer):
            size = {"batch": self.batch, "heads": self.heads, "key_dim": self.key_dim, "value_dim": self.value_dim}
            return self.layer.predicted_bytes(tokens, **size, dtype=self.dtype)
        # A full window keeps one token less than a query sees, its own.
        return self.token_bytes * (min(tokens, self.layer.sliding_window - 1) if self.layer.is_sliding else tokens)

    def updates(self, past_length: int, new: int) -> Iterator[int]:
        """Bytes after each `update` by which a pass over `new` tokens enters, what it returned included."""
        layer = self.layer
        if isinstance(layer, CompactLayer):
            yield from layer.updates(self, past_length, new)
        elif layer.is_sliding:
            # Keys and values are returned as they stand in the storage that the window is then a view of.
            yield self.held(past_length) + self.token_bytes * new
        else:
            yield self.held(past_length + new)


def peak_bytes(layers: list[CachedLayer], prompt: int, chunk: int, steps: int) -> int:
    """The most that the cache and what `update` returned take together, see `SurgeryForCausalLM.kv_peak_bytes`."""
    ends = [*range(chunk, prompt, chunk), *range(prompt, prompt + steps + 1)]
    peak, past_length = 0, 0
    before = [layer.held(0) for layer in layers]
    for end in ends:
        after = [layer.held(end) for layer in layers]
        others = sum(before)
        for layer, old, new in zip(layers, before, after, strict=True):
            others -= old
            peak = max(peak, *(others + live for live in layer.updates(past_length, end - past_length)))
            others += new
        before, past_length = after, end
    return peak


def seen_entries(tokens: int, limit: int | None = None) -> int:
    """Keys that the queries of a text of `tokens` tokens see in one head, added up: all earlier ones, or `limit`."""
    limit = tokens if limit is None else min(tokens, limit)
    return limit * (limit + 1) // 2 + (tokens - limit) * limit


def footprint(tokens: int, heads: int, windows: list[list[tuple[int, int | None, bool]]]) -> float:
    """Entries that attention looks at, over those of full causal attention.

    Args:
        tokens: of the text, prompt and decoded ones.
        heads: of queries in a layer.
        windows: of each layer, for some of its query heads: how many, the tokens that a query sees at most (None for
            all), and whether it sees one compensation token more once there are others.
    """
    total = 0
    for layer in windows:
        for number, limit, compensated in layer:
            extra = max(0, tokens - limit) if compensated else 0
            total += number * (seen_entries(tokens, limit) + extra)
    return total / (len(windows) * heads * seen_entries(tokens))
