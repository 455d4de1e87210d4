"""Predictions of a cache's bytes, of its peak memory, and of the share of query-key pairs that attention computes.

Closed forms, to check a memory budget before a model runs; tests hold them against measurements.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin

from .cache_layer import CompactLayer


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

    def updates(self, past_length: int, new: int) -> Iterator[int]:
        """Yield the bytes of the layer and of returned tensors after each `update` in a pass over `new` tokens."""
        layer = self.layer
        if isinstance(layer, CompactLayer):
            yield from layer.updates(self, past_length, new)
        elif layer.is_sliding:
            # `update` returns all keys and values; the window becomes a view of the same storage.
            yield self.held(past_length) + self.token_bytes * new
        else:
            yield self.held(past_length + new)


def peak_bytes(layers: list[CachedLayer], prompt: int, chunk: int, steps: int) -> int:
    """Predict the peak bytes of the cache and of returned tensors, see `SurgeryForCausalLM.kv_peak_bytes`."""
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
    """Count the visible query-key pairs of one head over `tokens` tokens; a query sees at most `limit` keys."""
    limit = tokens if limit is None else min(tokens, limit)
    return limit * (limit + 1) // 2 + (tokens - limit) * limit


def footprint(tokens: int, heads: int, windows: list[list[tuple[int, int | None, bool]]]) -> float:
    """Compute the query-key pairs that attention visits, as a share of full causal attention.

    Args:
        tokens: length of the text, prompt and decoded tokens.
        heads: query heads per layer.
        windows: by layer, a list of groups of its query heads: number of heads, most tokens that a query sees (None
            for all), and whether it also sees a compensation token once tokens have been dropped.
    """
    total = 0
    for layer in windows:
        for number, limit, compensated in layer:
            extra = max(0, tokens - limit) if compensated else 0
            total += number * (seen_entries(tokens, limit) + extra)
    return total / (len(windows) * heads * seen_entries(tokens))
