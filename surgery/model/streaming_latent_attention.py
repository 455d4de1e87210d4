"""MLA in which all heads see sinks and a window only.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from typing import Any

import torch
from transformers import Cache

from .attention_functions import attend, visible_mask
from .cache_layer import CompactLayer
from .hybrid_cache import StreamingLayer
from .latent_attention import LatentAttention
from .left_padding import LeftPadding, layer_of
from .streaming_latent_entry import StreamingLatentEntry


class StreamingLatentAttention(LatentAttention):
    """`LatentAttention` with latents for sinks and a window only (see `hybrid_cache`)."""

    def __init__(self, stock: torch.nn.Module, entry: StreamingLatentEntry):
        super().__init__(stock, entry)
        self.streaming = entry.streaming

    @classmethod
    def cache_layer_of(cls, entry: StreamingLatentEntry, whole: CompactLayer, codes: Any) -> StreamingLayer:
        """Make an empty cache layer of sinks and a window."""
        return StreamingLayer(entry.streaming.sinks, entry.streaming.recent, codes=codes)

    def _attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        positional: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        left_padding: LeftPadding | None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Compute outputs [B, T, H, r] over sinks and a window; returns no weights."""
        new = StreamingLayer(self.streaming.sinks, self.streaming.recent)
        layer = layer_of(cache, self.layer_idx, new, len(query), left_padding)
        out = []
        for piece in layer.pieces(latent, positional):
            key_value = self._latent_key_value(piece.keys, piece.values)
            mask = visible_mask(self, piece.visible, query.dtype)
            out.append(attend(self, query[:, :, piece.tokens], *key_value, mask, **kwargs)[0])
        return torch.cat(out, dim=1), None
