"""A window of recent tokens and the first few, the attention sinks: StreamingLLM, Xiao et al., arXiv:2309.17453.

A query at position q sees the key at position p if p ≤ q, and q - p < `recent` or p < `sinks`. Positions count from a
row's first token that is no padding. Keys keep the rotation of their own position in the text, as in DuoAttention's
streaming heads (arXiv:2410.10819), where StreamingLLM rotates by the place in the cache: only so is a plain forward
pass with a mask the same function as decoding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import BoolTensor, Tensor
from transformers.cache_utils import Cache

from .cache_layer import CompactLayer


class SinkWindowCache(Cache):
    """A cache of `SinkWindowLayer`s."""

    def __init__(self, sinks: int, recent: int, layers: int) -> None:
        """`sinks` and `recent` as in `SinkWindowLayer`; `layers` of the model."""
        super().__init__(layers=[SinkWindowLayer(sinks, recent) for _ in range(layers)])


class SinkWindowLayer(CompactLayer):
    """The cache of one layer: of T tokens the first `sinks` and the last `recent - 1`, or all if they are no more.

    `recent - 1`, because the query's own token is the window's last: during a decoding step attention reads
    `sinks + recent` tokens, between steps one less is kept, as in transformers' own sliding layers. A token moves to
    the sinks when it leaves the window and is never in both places.

    The tokens of a batch whose rows start with padding stand at different places in the sinks, so the mask that
    transformers makes cannot be right: attention needs the one that `visible` gives before each `update`.

    Attributes:
        padding: how many tokens each row starts with that are padding; to be set before `visible` and `update`.
        seen: tokens that have come, padding included.
        sink_keys, sink_values: [B, H, s, d], s ≤ `sinks`: slot j has the token of place `padding + j`, if that has
            left the window.
        keys, values: the window [B, H, w, d], w < `recent`, in every row the same places.
    """

    form = "a cache of sinks and a window"

    def __init__(self, sinks: int, recent: int) -> None:
        """Raises ValueError unless `sinks` ≥ 0 and `recent` ≥ 1."""
        super().__init__()
        if sinks < 0 or recent < 1:
            raise ValueError(
                f"a window of {recent} tokens with {sinks} sinks: at least 1 recent token and 0 sinks are needed"
            )
        self.sinks, self.recent = sinks, recent
        self.padding: list[int] | None = None
        self.seen = 0
        self.sink_keys: Tensor | None = None
        self.sink_values: Tensor | None = None

    def settings(self) -> tuple:
        """Sinks, recent."""
        return self.sinks, self.recent

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes batch, heads, head sizes, dtype and device from the first tokens."""
        self.keys, self.values = key_states[..., :0, :].clone(), value_states[..., :0, :].clone()
        self.sink_keys, self.sink_values = self.keys.clone(), self.values.clone()
        if self.padding is None:
            self.padding = [0] * len(key_states)
        self.is_initialized = True

    def visible(self, queries: int, device: torch.device) -> BoolTensor:
        """Which of the keys that `update` will return the next `queries` tokens of each row see.

        A padding token sees itself: attention to nothing at all is undefined.

        Returns:
            [B, 1, queries, keys], bool.
        """
        kept = self.sink_keys.shape[-2] if self.is_initialized else 0
        if queries == 1 and not any(self.padding):
            # What is kept is what the next token sees; a step of decoding need not find that out.
            keys = kept + self.seen - self._window_start + 1
            return torch.ones(len(self.padding), 1, 1, keys, dtype=torch.bool, device=device)
        padding = torch.tensor(self.padding, device=device).view(-1, 1)
        places = self.slots(queries, device)
        filled = torch.ones_like(places, dtype=torch.bool)
        filled[:, :kept] = places[:, :kept] < self._window_start
        filled, places = filled[:, None], places[:, None]
        own = torch.arange(self.seen, self.seen + queries, device=device).view(1, -1, 1)
        first = padding[:, None]
        near = (own - places < self.recent) | (places - first < self.sinks)
        seen = filled & (places >= first) & (places <= own) & near
        return (seen | (filled & (places == own)))[:, None]

    def slots(self, queries: int, device: torch.device) -> Tensor:
        """Places in the text, padding counted, of the tokens that `update` will return: [B, s + w + queries].

        A slot of the sinks that nothing belongs to yet has the place of the token that will be there.
        """
        padding = torch.tensor(self.padding, device=device).view(-1, 1)
        kept = self.sink_keys.shape[-2] if self.is_initialized else 0
        window = torch.arange(self._window_start, self.seen + queries, device=device).expand(len(padding), -1)
        return torch.cat([padding + torch.arange(kept, device=device), window], dim=1)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Adds tokens [B, H, n, d] and returns sinks, window and these [B, H, s + w + n, d]; see `visible`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = torch.cat([self.sink_keys, self.keys, key_states], dim=-2)
        values = torch.cat([self.sink_values, self.values, value_states], dim=-2)
        start, self.seen = self._window_start, self.seen + key_states.shape[-2]
        window = min(self.seen, self.recent - 1)
        self._move_to_sinks(keys, values, start, self.seen - window)
        # Copied, because a view would keep all tokens alive.
        first = keys.shape[-2] - window
        self.keys, self.values = keys[..., first:, :].clone(), values[..., first:, :].clone()
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens that have come: the next one's position, not the number kept."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Raises ValueError: transformers asks for this to make a mask that would be wrong."""
        raise ValueError(
            f"{self.form} needs its own attention mask: use the model that surgery.eval.variants.sink_window gives"
        )

    def reset(self) -> None:
        """Forgets all tokens."""
        self.keys = self.values = self.sink_keys = self.sink_values = self.padding = None
        self.seen = 0
        self.is_initialized = False

    @property
    def _window_start(self) -> int:
        """Place of the window's first token."""
        return self.seen - (self.keys.shape[-2] if self.is_initialized else 0)

    def _move_to_sinks(self, keys: Tensor, values: Tensor, start: int, new_start: int) -> None:
        """Keeps the sinks whose place is before `new_start`.

        `keys` and `values` [B, H, T, d] are the sinks so far and then the tokens from place `start` on.
        """
        if start - max(self.padding) >= self.sinks:  # complete in every row already
            return
        slots = torch.arange(max(0, min(self.sinks, new_start - min(self.padding))), device=keys.device)
        places = torch.tensor(self.padding, device=keys.device)[:, None] + slots
        held = self.sink_keys.shape[-2]
        # Slots that nothing belongs to yet take any token; `visible` leaves them out.
        index = torch.where(places < start, slots, places - start + held).clamp_(max=keys.shape[-2] - 1)
        index = index[:, None, :, None].expand(-1, keys.shape[1], -1, -1)
        self.sink_keys = keys.gather(2, index.expand(-1, -1, -1, keys.shape[-1]))
        self.sink_values = values.gather(2, index.expand(-1, -1, -1, values.shape[-1]))

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.sink_keys, self.sink_values = change(self.sink_keys), change(self.sink_values)
            self.padding = change(torch.tensor(self.padding)).tolist()


def set_padding(cache: Cache, mask: Tensor | None) -> list[int] | None:
    """Tell the layers with a `padding` how many tokens each row starts with that are none.

    Known once a real token of every row has come, whatever chunks a prompt comes in.

    Args:
        cache: one whose layers have seen the same tokens.
        mask: [B, tokens that came and that come now], zero at padding; None without any.

    Returns:
        The padding of each row if this call tells it, else None.

    Raises:
        ValueError: a mask of another form, or padding after the first real token among tokens that came earlier.
    """
    if mask is None:
        return None
    if getattr(mask, "ndim", None) != 2:
        raise ValueError("the attention mask is a prepared one: with sinks and a window it must be [batch, tokens]")
    layers = [layer for layer in cache.layers if hasattr(layer, "padding")]
    seen = cache.get_seq_length()
    known = next((layer.padding for layer in layers if layer.padding is not None), None)
    if seen and (known is None or max(known) < seen):
        if known and mask[:, :seen].bool().sum(-1).tolist() != [seen - padding for padding in known]:
            raise ValueError("the attention mask has padding after a row's first token: pad on the left")
        return None
    padding = (mask.long().cumsum(-1) == 0).sum(-1).tolist()
    for layer in layers:
        layer.padding = padding
    return padding
