"""MLA whose heads all see the first tokens and a window only.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from typing import Any

import torch
from transformers import Cache

from .attention_functions import attend, visible_mask
from .cache_layer import CompactLayer
from .configuration_surgery import SurgeryConfig
from .hybrid_cache import StreamingLayer, layer_of
from .latent_attention import LatentAttention
from .left_padding import LeftPadding
from .sink_window_cache import window_problem


class StreamingLatentAttention(LatentAttention):
    """`LatentAttention` whose latent, which all heads share, is kept for sinks and a window (see `hybrid_cache`)."""

    @classmethod
    def entry_problem(cls, config: SurgeryConfig, index: int, entry: dict[str, Any]) -> str | None:
        """Return what is wrong with the entry of a layer that streams."""
        if entry["streaming"].keys() != {"sinks", "recent"}:
            return f"streaming has keys {sorted(entry['streaming'])}, not ['recent', 'sinks']"
        return window_problem(entry["streaming"]) or super().entry_problem(config, index, entry)

    @classmethod
    def cache_layer_of(cls, entry: dict[str, Any], whole: CompactLayer, codes: Any) -> StreamingLayer:
        """Make an empty layer of sinks and a window."""
        return StreamingLayer(entry["streaming"]["sinks"], entry["streaming"]["recent"], codes=codes)

    @property
    def windows(self) -> list[tuple[int, int | None, bool]]:
        """All query heads, and the tokens that they see at most."""
        return [(self.num_heads, self.streaming["sinks"] + self.streaming["recent"], False)]

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
        """Outputs [B, T, H, r] of heads that see sinks and a window; there are no weights over all tokens."""
        new = StreamingLayer(self.streaming["sinks"], self.streaming["recent"])
        layer = layer_of(cache, self.layer_idx, new, len(query), left_padding)
        out = []
        for piece in layer.pieces(latent, positional):
            key_value = self._latent_key_value(piece.keys, piece.values)
            mask = visible_mask(self, piece.visible, query.dtype)
            out.append(attend(self, query[:, :, piece.tokens], *key_value, mask, **kwargs)[0])
        return torch.cat(out, dim=1), None


__all__ = ["StreamingLatentAttention"]
