"""Attention with full heads, which see all tokens, and streaming heads, which see sinks and a window.

See `hybrid_cache` for streaming heads, and for the paper.

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
from .hybrid_cache import HybridLayer, StreamingLayer
from .hybrid_entry import HybridEntry
from .left_padding import LeftPadding, layer_of
from .plain_cache import PlainLayer
from .rotary import project_heads, rotation_of


class HybridAttention(GroupedAttention):
    """The family's attention with full and streaming KV heads, in this order.

    Tensors are the family's, of `kv_heads` KV heads; H / G adjacent query heads share a KV head. Full heads use the
    decoder's own mask. In streaming heads query q sees key p if q - p < `recent` or p - padding < `sinks`, in every
    pass.
    """

    def __init__(self, stock: torch.nn.Module, entry: HybridEntry):
        super().__init__(stock, entry)
        self.num_heads = stock.config.num_attention_heads
        self.rotate = rotation_of(stock)
        self.full_heads, self.sinks, self.recent = entry.full_heads, entry.sinks, entry.recent

    @classmethod
    def cache_layer_of(cls, entry: HybridEntry, whole: CompactLayer, codes: Any) -> HybridLayer:
        """Make an empty cache layer of full and streaming heads."""
        streaming = StreamingLayer(entry.sinks, entry.recent, codes)
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
        new = HybridLayer(PlainLayer(), StreamingLayer(self.sinks, self.recent))
        layer = layer_of(cache, self.layer_idx, new, len(hidden_states), left_padding)
        full, group = self.full_heads, self.num_key_value_groups
        out, weights = [], None
        if full:
            full_states = layer.full.update(key[:, :full], value[:, :full])
            full_out, weights = attend(self, query[:, : full * group], *full_states, attention_mask, **kwargs)
            out.append(full_out)
            del full_states
        if full < self.num_kv_heads:
            weights, pieces = None, []
            for piece in layer.streaming.pieces(key[:, full:], value[:, full:]):
                mask = visible_mask(self, piece.visible, query.dtype)
                streamed = query[:, full * group :, piece.tokens]
                pieces.append(attend(self, streamed, piece.keys, piece.values, mask, **kwargs)[0])
            out.append(torch.cat(pieces, dim=1))
        return self.o_proj(torch.cat(out, dim=2).flatten(2)), weights
