"""Cache of a window of recent tokens and of attention sinks: StreamingLLM, Xiao et al., arXiv:2309.17453.

A query at position q sees the key at position p if p ≤ q, and q - p < `recent` or p < `sinks`. Positions count from a
row's first real token. Keys keep the rotation of their position in the text, as in DuoAttention's streaming heads
(arXiv:2410.10819), while StreamingLLM rotates by the index in the cache. Only so does a plain forward pass with a mask
compute the same function as decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import BoolTensor, Tensor
from transformers.cache_utils import Cache

from .cache_layer import CompactLayer
from .growing import refill
from .layer_entry import window_problem
from .left_padding import LeftPadding
from .step_memo import once


class SinkWindowCache(Cache):
    """Cache of `SinkWindowLayer`s."""

    def __init__(self, sinks: int, recent: int, layers: int) -> None:
        """Make an empty cache of `layers` layers; `sinks` and `recent` as in `SinkWindowLayer`."""
        super().__init__(layers=[SinkWindowLayer(sinks, recent) for _ in range(layers)])


class SinkWindowLayer(CompactLayer):
    """Cache layer of the first `sinks` and the last `recent - 1` tokens, or all if there are fewer.

    `recent - 1`, because the query's own token is the last of the window: a decode step reads `sinks + recent` tokens,
    and one less is kept between steps, as in transformers' sliding layers. A token moves to the sinks when it leaves
    the window and is never in both.

    With left padding, the same sink slot holds different positions in different rows, so the mask that transformers
    makes is wrong: attention needs the mask of `visible`, obtained before each `update`.

    Attributes:
        padding: left padding of each row; set before `visible` and `update`.
        seen: tokens seen, padding included.
        sink_keys, sink_values: [B, H, s, d], s ≤ `sinks`: slot j has the token at position `padding + j`, once it has
            left the window.
        keys, values: the window [B, H, w, d], w < `recent`, the same positions in every row.
    """

    form = "a cache of sinks and a window"

    def __init__(self, sinks: int, recent: int) -> None:
        """Make an empty layer; ValueError unless `sinks` ≥ 0 and `recent` ≥ 1."""
        super().__init__()
        if problem := window_problem(sinks, recent):
            raise ValueError(problem)
        self.sinks, self.recent = sinks, recent
        self.padding: LeftPadding | None = None
        self.seen = 0
        self.sink_keys: Tensor | None = None
        self.sink_values: Tensor | None = None

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Predict the bytes of the sinks and of a window without the query's own token."""
        slots = min(tokens, self.sinks + self.recent - 1)
        return slots * batch * heads * (key_dim + value_dim) * dtype.itemsize

    def settings(self) -> tuple:
        """Return sinks and recent."""
        return self.sinks, self.recent

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, heads, head sizes, dtype and device from the first tokens."""
        self.keys, self.values = key_states[..., :0, :].clone(), value_states[..., :0, :].clone()
        self.sink_keys, self.sink_values = self.keys.clone(), self.values.clone()
        if self.padding is None:
            self.padding = LeftPadding([0] * len(key_states))
        self.is_initialized = True

    def visible(self, queries: int, device: torch.device) -> BoolTensor:
        """Return the mask of the keys that `update` will return, for the next `queries` tokens of each row.

        A padding token sees itself: attention over no keys is undefined. Layers with the same padding share the mask.

        Returns:
            [B, 1, queries, keys], bool.
        """
        return self.once(("visible", queries), device, lambda: self._visible(queries, device))

    def slots(self, queries: int, device: torch.device) -> Tensor:
        """Return the positions [B, s + w + queries], padding included, of the tokens that `update` will return.

        An empty sink slot has the position of the token that it will hold.
        """
        return self.once(("slots", queries), device, lambda: self._slots(queries, device))

    def once(self, key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make()`, computed once per step for all layers with the same settings and positions."""
        state = type(self), self.sinks, self.recent, self.sink_slots, self.window_start
        return once(self.padding.on(device), (key, state), make, step=self.seen)

    def _visible(self, queries: int, device: torch.device) -> BoolTensor:
        sinks, padding = self.sink_slots, self.padding.on(device)
        if queries == 1 and not self.padding.most:
            # The next token sees all kept tokens; no need to compute that in a decode step.
            keys = sinks + self.seen - self.window_start + 1
            return torch.ones(len(padding), 1, 1, keys, dtype=torch.bool, device=device)
        positions = self.slots(queries, device)
        filled = torch.ones_like(positions, dtype=torch.bool)
        filled[:, :sinks] = positions[:, :sinks] < self.window_start
        filled, positions = filled[:, None], positions[:, None]
        own = torch.arange(self.seen, self.seen + queries, device=device).view(1, -1, 1)
        first = padding.view(-1, 1, 1)
        near = (own - positions < self.recent) | (positions - first < self.sinks)
        visible = filled & (positions >= first) & (positions <= own) & near
        return (visible | (filled & (positions == own)))[:, None]

    def _slots(self, queries: int, device: torch.device) -> Tensor:
        padding = self.padding.on(device).view(-1, 1)
        window = torch.arange(self.window_start, self.seen + queries, device=device).expand(len(padding), -1)
        return torch.cat([padding + torch.arange(self.sink_slots, device=device), window], dim=1)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append tokens [B, H, n, d]; return sinks, window and new tokens [B, H, s + w + n, d], masked by `visible`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = torch.cat([self.sink_keys, self.keys, key_states], dim=-2)
        values = torch.cat([self.sink_values, self.values, value_states], dim=-2)
        start, self.seen = self.window_start, self.seen + key_states.shape[-2]
        window = min(self.seen, self.recent - 1)
        self._move_to_sinks(keys, values, start, self.seen - window)
        first, max_tokens = keys.shape[-2] - window, self.recent - 1
        self.keys = refill(self.keys, keys[..., first:, :], max_size=max_tokens)
        self.values = refill(self.values, values[..., first:, :], max_size=max_tokens)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, which is the next position, not the number kept."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Raise ValueError: the mask that transformers would make from the sizes is wrong."""
        raise ValueError(
            f"{self.form} needs its own attention mask: use the model from surgery.eval.variants.sink_window"
        )

    def reset(self) -> None:
        """Drop all tokens."""
        self.keys = self.values = self.sink_keys = self.sink_values = self.padding = None
        self.seen = 0
        self.is_initialized = False

    @property
    def sink_slots(self) -> int:
        """Number of sink slots in use."""
        return self.sink_keys.shape[-2] if self.is_initialized else 0

    @property
    def window_start(self) -> int:
        """Position of the window's first token."""
        return self.seen - (self.keys.shape[-2] if self.is_initialized else 0)

    def _move_to_sinks(self, keys: Tensor, values: Tensor, start: int, new_start: int) -> None:
        """Move tokens before position `new_start` that are sinks to the sink slots.

        `keys` and `values` [B, H, T, d] are the sinks so far and then the tokens from position `start` on.
        """
        padding = self.padding
        if start - padding.most >= self.sinks:  # complete in every row already
            return
        slots = torch.arange(max(0, min(self.sinks, new_start - padding.least)), device=keys.device)
        positions = padding.on(keys.device)[:, None] + slots
        num_sinks = self.sink_keys.shape[-2]
        # Empty slots take any token; `visible` hides them.
        index = torch.where(positions < start, slots, positions - start + num_sinks).clamp_(max=keys.shape[-2] - 1)
        index = index[:, None, :, None].expand(-1, keys.shape[1], -1, -1)
        sinks = (tokens.gather(2, index.expand(-1, -1, -1, tokens.shape[-1])) for tokens in (keys, values))
        self.sink_keys, self.sink_values = (
            refill(old, new, max_size=self.sinks)
            for old, new in zip((self.sink_keys, self.sink_values), sinks, strict=True)
        )

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.sink_keys, self.sink_values = change(self.sink_keys), change(self.sink_values)
            self.padding = self.padding.changed(change)
