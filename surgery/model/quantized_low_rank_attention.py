"""Low-rank attention over a cache of packed rows: keys and values are rebuilt from quantized latents.

Shapes: B batch, T new tokens, S tokens in the cache, r latent elements of the layer, s of earlier layers.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from typing import Any

import torch
from torch import nn
from transformers import Cache

from .left_padding import LeftPadding, layer_of
from .low_rank_attention import LowRankAttention
from .quantized_low_rank_entry import QuantizedLowRankEntry
from .token_cache import TokenCacheLayer
from .token_quantizer import TokenQuantizer


class QuantizedLowRankAttention(LowRankAttention):
    r"""Low-rank attention whose cache holds one packed row per token.

    With Q the quantizer of a channel and shared_n the latents of token n in the earlier layers of a group, as read:

        c_n = kv_down(x_n) - shared_down(shared_n)
        read: Q(c_n)                                    c_n itself for the first tokens of a text

    So a layer quantizes only the residual that earlier latents do not predict. `key_bias` and `value_bias` hold the
    mean of what no latent explains. Training reads quantized values too, with straight-through gradients.
    """

    latent_slices = ()  # each channel has its own step and bits, so training must not mix or drop channels

    def latent_readers(self) -> list[list[torch.Tensor]]:
        """Return no views: latents must not be truncated or rescaled."""
        return []

    @classmethod
    def cache_layer_of(cls, entry: QuantizedLowRankEntry, whole: Any, codes: Any) -> TokenCacheLayer:
        """Make an empty cache layer of packed rows."""
        return TokenCacheLayer(entry.format.row_bytes, entry.format.channels, entry.first_tokens)

    def __init__(self, stock: nn.Module, entry: QuantizedLowRankEntry):
        super().__init__(stock, entry)
        self.entry = entry
        self.quantizer = TokenQuantizer(entry.format)
        if self.shared_layers:
            self.shared_down = nn.Linear(entry.shared_rank, sum(self.ranks), bias=False)

    def initialize_weights(self) -> None:
        """Initialize tensors that the base model does not have; loaded tensors stay unchanged."""
        super().initialize_weights()
        self.quantizer.initialize_weights()

    def _cached(self, latent: torch.Tensor, cache: Cache | None, left_padding: LeftPadding | None) -> torch.Tensor:
        self.quantizer.check()
        new = self.cache_layer_of(self.entry, None, None)
        layer = layer_of(cache, self.layer_idx, new, len(latent), left_padding)
        if self.shared_layers:
            shared = self._shared(latent.device)[:, layer.get_seq_length() :]
            latent = latent - self.shared_down(shared).unsqueeze(1)
        rows, _ = layer.update(self.quantizer.encode(latent.detach()), latent)
        return layer.with_first(self.quantizer.decode_cached(rows, latent))
