"""Attention with full heads, which see all tokens, and streaming heads, which see sinks and a window.

See `hybrid_cache` for streaming and compensated heads, and for the papers.

Shapes: B batch, T new tokens, S tokens in the cache, H query heads, G KV heads, d head_dim, D hidden size.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from typing import Any

import torch
from transformers import Cache

from .attention_functions import attend, scaled_by_position, visible_mask
from .cache_argument import takes_cache
from .cache_layer import CompactLayer
from .grouped_attention import GroupedAttention
from .hybrid_cache import Dropped, HybridLayer, StreamingLayer
from .hybrid_entry import HybridEntry
from .left_padding import LeftPadding, layer_of
from .plain_cache import PlainLayer
from .rotary import project_heads, rotation_of


class HybridAttention(GroupedAttention):
    r"""The family's attention with full, streaming, and compensated streaming KV heads, in this order.

    Tensors are the family's, of `kv_heads` KV heads; H / G adjacent query heads share a KV head. Full heads use the
    decoder's own mask. In streaming heads query q sees key p if q - p < `recent` or p - padding < `sinks`, in every
    pass. With N(q) dropped keys and their means k̄(q), v̄(q), a compensated head is

        softmax([scaling · q kᵀ ; scaling · q k̄ᵀ + log N]) [v ; v̄].
    """

    def __init__(self, stock: torch.nn.Module, entry: HybridEntry):
        super().__init__(stock, entry)
        self.num_heads = stock.config.num_attention_heads
        self.rotate = rotation_of(stock)
        self.full_heads, self.compensated_heads = entry.full_heads, entry.compensated_heads
        self.sinks, self.recent = entry.sinks, entry.recent

    @classmethod
    def cache_layer_of(cls, entry: HybridEntry, whole: CompactLayer, codes: Any) -> HybridLayer:
        """Make an empty cache layer of full and streaming heads."""
        streaming = StreamingLayer(entry.sinks, entry.recent, entry.compensated_heads, codes)
        return HybridLayer(
            whole if entry.full_heads else None, streaming if entry.streaming_heads else None, heads=entry.full_heads
        )

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        left_padding: LeftPadding | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the output [B, T, D] of hidden_states [B, T, D]; weights [B, H, T, S] if eager and no head streams.

        `left_padding` is used without a cache; a cache has its own.
        """
        query, key, value = project_heads(self, hidden_states, position_embeddings)
        query = scaled_by_position(self, query, kwargs.get("position_ids"))
        new = HybridLayer(PlainLayer(), StreamingLayer(self.sinks, self.recent, self.compensated_heads))
        layer = layer_of(cache, self.layer_idx, new, len(hidden_states), left_padding)
        full = self.full_heads
        out, weights = [], None
        if full:
            full_states = layer.full.update(key[:, :full], value[:, :full])
            full_out, weights = attend(self, self._queries(query, 0, full), *full_states, attention_mask, **kwargs)
            out.append(full_out)
            del full_states
        if full < self.num_kv_heads:
            weights = None
            out.append(self._streamed(query, key[:, full:], value[:, full:], layer.streaming, **kwargs))
        return self.o_proj(torch.cat(out, dim=2).flatten(2)), weights

    def _queries(self, query: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Select the queries of KV heads `first` to `stop` - 1 from [B, H, T, d]."""
        return query[:, first * self.num_key_value_groups : stop * self.num_key_value_groups]

    def _streamed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: StreamingLayer, **kwargs
    ) -> torch.Tensor:
        """Compute outputs [B, T, ·, d] of the streaming heads from queries [B, H, T, d] and new keys and values."""
        out = []
        compensated = self.num_kv_heads - self.compensated_heads
        for piece in layer.pieces(key, value):
            queries = query[:, :, piece.tokens]
            heads = []
            if plain := compensated - self.full_heads:
                mask = visible_mask(self, piece.visible, query.dtype)
                states = piece.keys[:, :plain], piece.values[:, :plain]
                heads.append(
                    attend(self, self._queries(queries, self.full_heads, compensated), *states, mask, **kwargs)[0]
                )
            if self.compensated_heads:
                states = piece.keys[:, plain:], piece.values[:, plain:]
                last_queries = self._queries(queries, compensated, self.num_kv_heads)
                heads.append(self._compensated(last_queries, *states, piece.visible, layer.take_dropped(), **kwargs))
            out.append(torch.cat(heads, dim=2))
        return torch.cat(out, dim=1)

    def _compensated(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor,
        dropped: Dropped,
        **kwargs,
    ) -> torch.Tensor:
        """Compute outputs [B, n, ·, d] of the compensated heads from queries [B, ·, n, d] and keys [B, Hc, K, d].

        Each query's means are appended to the keys, visible to that query alone, with log N as additive mask. Runs in
        fp32 at least, because log N in bf16 would be off by up to 3%.
        """
        wide = dropped.keys.dtype
        least = torch.finfo(wide).min
        window = torch.zeros_like(visible, dtype=wide).masked_fill_(~visible, least)
        logs = dropped.count.to(wide).log().clamp(min=least)  # hides means of no tokens
        own = torch.eye(query.shape[2], dtype=torch.bool, device=query.device)
        means = logs[:, None, None].masked_fill(~own, least)
        out, _ = attend(
            self,
            query.to(wide),
            torch.cat((key.to(wide), dropped.keys), dim=2),
            torch.cat((value.to(wide), dropped.values), dim=2),
            torch.cat((window, means), dim=-1),
            **kwargs,
        )
        return out.to(value.dtype)
