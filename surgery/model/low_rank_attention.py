"""Attention that caches low-rank latents and rebuilds keys and values from them, replacing a family's own attention.

Keys are rebuilt before the key norm and the rotation, so both stay exact. CSKV (arXiv:2409.10593) has one latent for
keys and one for values, Palu (arXiv:2407.21118) two per group of heads; a joint latent for both retains more at the
same bytes. A layer may also read the latents of earlier layers, which are in the cache already.

Shapes: B batch, T new tokens, S tokens in the cache, H query heads, G KV heads, d head_dim, D hidden size, r latent
elements of the layer, s latent elements of earlier layers.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers import initialization as init

from .attention_functions import (
    Accelerated,
    attend,
    begin_as,
    gated,
    normalize_heads,
    project_queries,
    scaled_by_position,
    take,
    visible_mask,
)
from .cache_argument import takes_cache
from .cache_layer import CompactLayer
from .hybrid_cache import HybridLayer, StreamingLayer
from .left_padding import LeftPadding, layer_of
from .low_rank_entry import LowRankEntry
from .plain_cache import PlainLayer
from .residual_window_cache import ResidualWindowLayer
from .rotary import connect_rotary, rotation_of, unrotated
from .step_memo import once
from .up_projections import UpProjections


@dataclass(frozen=True)
class _Part:
    """Blocks whose latents are cached together, and the heads that read them.

    Attributes:
        blocks: indices of the blocks.
        heads: KV heads rebuilt from the blocks, ascending.
        queries: query heads of these KV heads.
        key_order, value_order: index of each of `heads` in the output of the up-projections; None if in order.
    """

    blocks: list[int]
    heads: list[int]
    queries: list[int]
    key_order: list[int] | None
    value_order: list[int] | None


class LowRankAttention(Accelerated, nn.Module):
    r"""Low-rank attention, a replacement of a family's stock attention module.

    With R_m the rotation of position m and c_n = kv_down(x_n), the cached latent:

        [k_g(n)]_g = key_up_b [shared_n ; c_n^b] + key_bias     for the KV heads g that block b serves
        [v_g(n)]_g = value_up_b [shared_n ; c_n^b] + value_bias
        score_h(m, n) = scaling · ⟨R_m q_h(m), R_n k_norm(k_g(n))⟩

    `shared_n` are the latents of the same token in the `shared_layers` layers before this one; only a layer with one
    block reads any. Positions are indices in the cache: RoPE depends on distances alone, and left padding shifts
    queries and keys of a row together. With multi-axis RoPE, `axis_positions` holds the positions of all tokens.

    With a `window` the latest tokens, and with `sinks` the first ones, are read in full precision: a query at m sees
    the source's keys and values at n > m - window and n < sinks, and rebuilt ones at all other n. The layer keeps
    `k_proj` and `v_proj` for that, and caches full-precision tokens next to all latents (see `ResidualWindowLayer`).

    With `streaming` in its entry, the latents of some blocks are kept for sinks and a window only, and all heads that
    are rebuilt from them stream (see `hybrid_cache`).
    """

    @classmethod
    def cache_layer_of(cls, entry: LowRankEntry, whole: CompactLayer, codes: Any) -> CompactLayer:
        """Make an empty cache layer of latents, of which some may stream, or with a residual window."""
        if entry.window:
            return ResidualWindowLayer(entry.sinks, entry.window, whole)
        if not (settings := entry.streaming):
            return whole
        width = sum(rank for number, rank in enumerate(entry.ranks) if number not in settings.blocks)
        streaming = StreamingLayer(settings.sinks, settings.recent, codes=codes)
        return HybridLayer(whole if width else None, streaming, width=width)

    def __init__(self, stock: nn.Module, entry: LowRankEntry):
        begin_as(self, stock)
        config = stock.config
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.rotate = rotation_of(stock)
        # Gemma 3 and OLMo 3 have RoPE frequencies per layer type.
        kind = getattr(stock, "layer_type", getattr(stock, "attention_type", None))
        self.rope_of = kind if kind in (getattr(config, "rope_parameters", None) or ()) else None
        self.sliding_window = getattr(stock, "sliding_window", getattr(config, "sliding_window", None)) or None

        self.ranks, self.shared_layers = list(entry.ranks), entry.shared_layers
        self.exact_sinks, self.window = entry.sinks, entry.window

        self.q_proj = stock.q_proj
        self.o_proj = stock.o_proj
        if hasattr(stock, "sinks"):
            self.sinks = stock.sinks
        self.q_norm = getattr(stock, "q_norm", None)
        self.k_norm = getattr(stock, "k_norm", None)
        if self.window:
            self.k_proj, self.v_proj = stock.k_proj, stock.v_proj
        self.kv_down = nn.Linear(config.hidden_size, sum(self.ranks), bias=False)
        self.key_up, self.value_up = (
            UpProjections(
                {
                    number: (len(heads) * self.head_dim, entry.shared_rank + entry.ranks[number])
                    for number, heads in enumerate(served)
                    if heads
                }
            )
            for served in ([block.keys for block in entry.blocks], [block.values for block in entry.blocks])
        )
        # The source's biases are the same for every token, so they need no latent elements.
        biased = (entry.has_bias or projection.bias is not None for projection in (stock.k_proj, stock.v_proj))
        width = self.num_kv_heads * self.head_dim
        self.key_bias, self.value_bias = (nn.Parameter(torch.empty(width)) if bias else None for bias in biased)
        self.streaming = entry.streaming
        streaming = sorted(self.streaming.blocks) if self.streaming else []
        self._full = self._part(entry, [number for number in range(len(self.ranks)) if number not in streaming])
        self._streaming = self._part(entry, streaming)

        # Set by `connect`; `shared_latents` holds the latents that layers of one forward pass share.
        self.rotary: tuple[nn.Module, ...] = ()
        self.shared_latents: dict[int, torch.Tensor] = {}
        self.shares_latents = False

    def initialize_weights(self) -> None:
        """Initialize tensors that the base model does not have; loaded tensors stay unchanged."""
        for up in (*self.key_up.matrices().values(), *self.value_up.matrices().values()):
            init.normal_(up, std=self.config.initializer_range)
        for bias in (self.key_bias, self.value_bias):
            if bias is not None:
                init.zeros_(bias)

    def connect(self, decoder: nn.Module, shared_latents: dict[int, torch.Tensor]) -> None:
        """Store references to the rotary embedding and shared latents; have earlier layers provide theirs."""
        connect_rotary(self, decoder)
        self.shared_latents = shared_latents
        for index in range(self.layer_idx - self.shared_layers, self.layer_idx):
            decoder.layers[index].self_attn.shares_latents = True

    @property
    def latent_slices(self) -> list[slice]:
        """Slices of `kv_down`'s outputs with the latent elements of each block, which can be truncated at the end.

        Removing the last elements of a block equals setting them to zero, so the leading ones alone form a smaller
        layer (`surgery slice`).
        """
        ends = [sum(self.ranks[: number + 1]) for number in range(len(self.ranks))]
        return [slice(end - rank, end) for end, rank in zip(ends, self.ranks, strict=True)]

    def latent_readers(self) -> list[list[torch.Tensor]]:
        """Return, per block, views [·, r] of all weights that read its latents; empty if later layers read them too."""
        if self.shares_latents:
            return []
        ups = self.key_up.matrices(), self.value_up.matrices()
        return [[up[number][:, -rank:] for up in ups if number in up] for number, rank in enumerate(self.ranks)]

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        left_padding: LeftPadding | None = None,
        axis_positions: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the output [B, T, D] of hidden_states [B, T, D] and, if eager, weights [B, H, T, S].

        `position_embeddings` are unused, see the class. `left_padding` is used without a cache, if the layer has a
        window or streams. A layer with streaming blocks returns no weights. `axis_positions` as in `AxisDecoder`.
        """
        kwargs["sliding_window"] = self.sliding_window
        batch, num_tokens, _ = hidden_states.shape
        latent = self.kv_down(hidden_states).unsqueeze(1)
        past_length, length, first = 0, num_tokens, 0
        if cache is not None:
            past_length = cache.get_seq_length(self.layer_idx)
            length, first = cache.get_mask_sizes(num_tokens, self.layer_idx)
        slots = torch.arange(num_tokens, device=latent.device) + past_length
        query, gate = project_queries(self, hidden_states)
        positions = kwargs.get("position_ids")  # None in Llama 4, which counts in the cache
        query = self._rotated(query.transpose(1, 2), slots, axis_positions)
        query = scaled_by_position(self, query, slots[None] if positions is None else positions)
        if self.streaming:
            new = HybridLayer(PlainLayer(), StreamingLayer(self.streaming.sinks, self.streaming.recent))
            layer = layer_of(cache, self.layer_idx, new, batch, left_padding)
            out = self._attend_streaming(query, latent, attention_mask, layer, axis_positions, **kwargs)
            return self.o_proj(gated(out, gate).reshape(batch, num_tokens, -1)), None

        exact = visible = layer = None
        if self.window:
            exact = self._full_precision(hidden_states)
            new = ResidualWindowLayer(self.exact_sinks, self.window)
            layer = layer_of(cache, self.layer_idx, new, batch, left_padding)
        if self.kernel is not None and axis_positions is None:
            out = self.kernel(self, query, latent, attention_mask, cache)
            if out is not None:
                return self.o_proj(gated(out, gate).reshape(batch, num_tokens, -1)), None
        if self.window:
            visible, exact_slots = layer.visible(num_tokens, latent.device), layer.slots(num_tokens, latent.device)
            latent, exact = layer.update(latent, exact)
        else:
            latent = self._cached(latent, cache, left_padding)
        if self.shares_latents:
            self.shared_latents[self.layer_idx] = latent

        key, value = self._rebuilt(latent, self._full)
        key_slots = torch.arange(length, device=latent.device) + first
        key = self._rotated(key, key_slots, axis_positions)
        if self.window:
            exact_key, exact_value = exact.unflatten(-1, (2 * self.num_kv_heads, self.head_dim))[:, 0].chunk(2, dim=2)
            exact_key = self._rotated(exact_key.transpose(1, 2), exact_slots, axis_positions)
            key = torch.cat((key, exact_key), dim=2)
            value = torch.cat((value, exact_value.transpose(1, 2)), dim=2)
            attention_mask = visible_mask(
                self, self._mask(attention_mask, visible, slots, key_slots, layer), query.dtype
            )

        out, weights = attend(self, query, key, value, attention_mask, **kwargs)
        if self.window and weights is not None:  # add up a token's rebuilt and full-precision columns
            weights, exact_weights = weights.split((length, weights.shape[-1] - length), dim=-1)
            columns = exact_slots.clamp(max=length - 1)[:, None, None].expand_as(exact_weights)
            weights = weights.scatter_add(-1, columns, exact_weights)
        return self.o_proj(gated(out, gate).reshape(batch, num_tokens, -1)), weights

    def _attend_streaming(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        mask: torch.Tensor | None,
        layer: HybridLayer,
        positions: torch.Tensor | None,
        **kwargs,
    ) -> torch.Tensor:
        """Compute outputs [B, T, H, d] of rotated queries [B, H, T, d] and latents [B, 1, T, r] if blocks stream."""
        blocks = latent.split(self.ranks, dim=-1)
        if (part := self._full).blocks:
            new = torch.cat([blocks[number] for number in part.blocks], dim=-1)
            cached, _ = layer.full.update(new, new[..., :0])
            key, value = self._rebuilt(cached, part)
            key = self._rotated(key, torch.arange(cached.shape[2], device=cached.device), positions)
            full = attend(self, take(query, part.queries, 1), key, value, mask, **kwargs)[0]
        part = self._streaming
        new = torch.cat([blocks[number] for number in part.blocks], dim=-1)
        streamed = []
        for piece in layer.streaming.pieces(new, new[..., :0], with_slots=True):
            key, value = self._rebuilt(piece.keys, part)
            queries = take(query, part.queries, 1)[:, :, piece.tokens]
            visible = visible_mask(self, piece.visible, query.dtype)
            key = self._rotated(key, piece.slots, positions)
            streamed.append(attend(self, queries, key, value, visible, **kwargs)[0])
        out = torch.cat(streamed, dim=1)
        if not self._full.blocks:
            return out
        order = [*self._full.queries, *part.queries]
        return take(torch.cat((full, out), dim=2), sorted(range(len(order)), key=order.__getitem__), 2)

    def _part(self, entry: LowRankEntry, numbers: list[int]) -> _Part:
        keys = [head for number in numbers for head in entry.blocks[number].keys]
        values = [head for number in numbers for head in entry.blocks[number].values]
        heads, size = sorted(keys), self.num_key_value_groups
        queries = [head * size + offset for head in heads for offset in range(size)]
        return _Part(numbers, heads, queries, _order(keys), _order(values))

    def _cached(self, latent: torch.Tensor, cache: Cache | None, left_padding: LeftPadding | None) -> torch.Tensor:
        """Cache new latents [B, 1, T, r]; return the latents of all tokens [B, 1, S, r]."""
        return latent if cache is None else cache.update(latent, latent[..., :0], self.layer_idx)[0]

    def _shared(self, device: torch.device) -> torch.Tensor:
        """Return the latents of earlier layers [B, S, s]."""
        earlier = range(self.layer_idx - self.shared_layers, self.layer_idx)
        return torch.cat([self.shared_latents[index][:, 0].to(device) for index in earlier], dim=-1)

    def _rebuilt(self, latent: torch.Tensor, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Rebuild normalized, unrotated keys and values [B, ·, S, d] of a part's heads from latents [B, 1, S, r]."""
        own = latent[:, 0].split([self.ranks[number] for number in part.blocks], dim=-1)
        if self.shared_layers:
            own = (torch.cat((self._shared(latent.device), *own), dim=-1),)
        latents = dict(zip(part.blocks, own, strict=True))
        key = self._heads(latents, self.key_up, part.key_order)
        value = self._heads(latents, self.value_up, part.value_order)
        if self.key_bias is not None:
            key = key + take(self.key_bias.view(self.num_kv_heads, 1, self.head_dim), part.heads, 0)
        if self.value_bias is not None:
            value = value + take(self.value_bias.view(self.num_kv_heads, 1, self.head_dim), part.heads, 0)
        return normalize_heads(self.k_norm, key, at=1), value

    def _heads(self, latents: dict[int, torch.Tensor], up: UpProjections, order: list[int] | None) -> torch.Tensor:
        """Up-project the latents [B, S, ·] of blocks to heads in order, without bias [B, ·, S, d]."""
        return take(up(latents).unflatten(-1, (-1, self.head_dim)), order, 2).transpose(1, 2)

    def _full_precision(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the source's keys (normalized, not rotated) and values [B, 1, T, 2·G·d]."""
        key = self.k_proj(hidden_states)
        if self.k_norm is not None:
            key = normalize_heads(self.k_norm, key.unflatten(-1, (self.num_kv_heads, self.head_dim))).flatten(-2)
        return torch.cat((key, self.v_proj(hidden_states)), dim=-1).unsqueeze(1)

    def _rotated(self, heads: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Rotate heads [B, ·, S, d] of the tokens with cache indices `slots`, [S] or [B, S].

        They are rotated to their `positions` [A, B, S] with multi-axis RoPE, else to `slots`. Indices without a token
        belong to keys that the mask hides.
        """
        if self.rotate is unrotated:
            return heads
        slots = slots if slots.ndim == 2 else slots[None]
        if positions is not None:
            indices = slots.clamp(max=positions.shape[-1] - 1).expand(*positions.shape[:2], -1)
            slots = positions.gather(-1, indices)
        (rotary,) = self.rotary
        return self.rotate(heads, *rotary(heads, slots))

    def _causal(self, mask: torch.Tensor | None, slots: torch.Tensor, key_slots: torch.Tensor) -> torch.Tensor:
        """Return the mask of keys that are visible, rebuilt or in full precision, bool [B or 1, 1, T, S]."""
        if mask is None:
            return (slots[:, None] >= key_slots)[None, None]
        mask = mask[..., : len(key_slots)]
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2

    def _mask(
        self,
        mask: torch.Tensor | None,
        visible: torch.Tensor,
        slots: torch.Tensor,
        key_slots: torch.Tensor,
        layer: ResidualWindowLayer,
    ) -> torch.Tensor:
        """Return the mask of rebuilt and then full-precision keys, bool [B, 1, T, S + E], memoized for equal layers."""

        def make() -> torch.Tensor:
            start = layer.padding.on(slots.device)[:, None, None]
            exact = (slots[:, None] - key_slots < self.window) | (key_slots - start < self.exact_sinks)
            rebuilt = self._causal(mask, slots, key_slots) & ~exact[:, None]
            return torch.cat((rebuilt, visible.expand(len(rebuilt), -1, -1, -1)), dim=-1)

        # In a step all layers have the same mask tensor, and those with equal windows the same `visible`.
        key = "with rebuilt", id(visible), self.window, self.exact_sinks
        return once(visible if mask is None else mask, key, make)


def _order(heads: list[int]) -> list[int] | None:
    """Return the index of each head, ascending, in `heads`; None if they are in order."""
    return None if heads == sorted(heads) else sorted(range(len(heads)), key=heads.__getitem__)
