"""Multi-head latent attention that reads a cache of packed rows: quantized latents and shared keys.

The shared key is quantized before its rotation, where its channels have steady ranges, and rotated when it is read; its
components are few and serve all heads. Nothing else is rebuilt: queries and outputs absorb the up-projections, as in
`LatentAttention`.

Shapes: B batch, T new tokens, S tokens in the cache, r kv_lora_rank, ρ width of the shared key, G KV heads.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from typing import Any

import torch
from torch import nn
from transformers import Cache

from .attention_functions import attend, gated, project_queries, rotate_pairs, scaled_by_position
from .cache_argument import takes_cache
from .latent_attention import LatentAttention
from .left_padding import LeftPadding, layer_of
from .quantized_latent_entry import QuantizedLatentEntry
from .token_cache import TokenCacheLayer
from .token_quantizer import TokenQuantizer


class QuantizedLatentAttention(LatentAttention):
    r"""MLA whose cache holds, of each token, one row: shared key, latent, and the gains of a key norm.

    With c = kv_down(x), Q the quantizer of a channel and n the place of a token in the cache:

        latent_n, k_rope_n = Q(c_n)[:r], R_n Q(c_n)[r:]      c_n itself for the first tokens of a text

    and scores and outputs as in `LatentAttention`. Positions are places in the cache: RoPE sees differences of
    positions alone. Where positions have several axes, `axis_positions` says those of all places. Training reads
    quantized values too, with gradients straight through.
    """

    @classmethod
    def cache_layer_of(cls, entry: QuantizedLatentEntry, whole: Any, codes: Any) -> TokenCacheLayer:
        """Make an empty layer of packed rows."""
        return TokenCacheLayer(entry.format.row_bytes, entry.format.channels, entry.first_tokens)

    def __init__(self, stock: nn.Module, entry: QuantizedLatentEntry):
        super().__init__(stock, entry)
        self.entry = entry
        self.quantizer = TokenQuantizer(entry.format)

    def initialize_weights(self) -> None:
        """Fill what the base model's own initialisation does not know; loaded tensors are left alone."""
        super().initialize_weights()
        self.quantizer.initialize_weights()

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        left_padding: LeftPadding | None = None,
        axis_positions: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [B, T, D] → output [B, T, D] and, if eager, weights [B, H, T, S].

        Arguments as in `LatentAttention`; `position_ids` are read by families alone that scale queries by them.
        """
        self.quantizer.check()
        batch, num_tokens, _ = hidden_states.shape
        new = self.cache_layer_of(self.entry, None, None)
        layer = layer_of(cache, self.layer_idx, new, batch, left_padding)
        seen = layer.get_seq_length()
        places = torch.arange(seen + num_tokens, device=hidden_states.device)[None]
        positions = places if axis_positions is None else axis_positions
        query, gate = project_queries(self, hidden_states)
        query = self._latent_query(query, *self.rotary(positions[..., seen:]))
        query = scaled_by_position(self, query, places[:, seen:] if position_ids is None else position_ids)
        values, out, weights = self.kv_down(hidden_states).unsqueeze(1), None, None
        if self.kernel is not None and axis_positions is None:
            out = self.kernel(self, query, values, hidden_states, attention_mask, layer)
        if out is None:
            read, gains = self._read(values, hidden_states, layer)
            latent, k_rope = read.split((self.kv_lora_rank, self.rope_dim), dim=-1)
            positional = torch.cat((rotate_pairs(k_rope, *self.rotary(positions)), *gains), dim=-1)
            kwargs |= {"sliding_window": self.sliding_window, "position_ids": position_ids}
            out, weights = attend(self, query, *self._latent_key_value(latent, positional), attention_mask, **kwargs)
        out = gated(torch.einsum("bthr,hvr->bthv", out, self.value_up), gate)
        return self.o_proj(out.reshape(batch, num_tokens, -1)), weights

    @staticmethod
    def with_gains(rows: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        """Rows [B, 1, T, row_bytes], and after them in fp16 the gains [B, 1, T, G] of a key norm."""
        half = gains.detach().to(torch.float16).contiguous()
        return torch.cat((rows, half.view(torch.uint8)), dim=-1)

    def _read(
        self, values: torch.Tensor, hidden_states: torch.Tensor, layer: TokenCacheLayer
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Cache new tokens [B, 1, T, r + ρ]; what is read of all [B, 1, S, r + ρ], and gains of a key norm."""
        packed, gains = self.quantizer.format.row_bytes, []
        rows = self.quantizer.encode(values.detach())
        if self.key_norm_eps is not None:
            new = self._key_irms(hidden_states)
            rows = self.with_gains(rows, new)
        rows, _ = layer.update(rows, values)
        read = self.quantizer.decode(rows[..., :packed], values.dtype)
        if self.key_norm_eps is not None:
            half = rows[..., packed:].contiguous().view(torch.float16).to(values.dtype)
            gains.append(_with_gradient(half, new))
        if values.requires_grad:
            read = _with_gradient(read, self.quantizer.unclipped(values))
        return layer.with_first(read), gains


def _with_gradient(read: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Give the last tokens of `read` [B, 1, S, ·] the gradient of `new` [B, 1, T, ·], straight through."""
    if not new.requires_grad:
        return read
    old = read.shape[2] - new.shape[2]
    own = read[..., old:, :].detach() + (new - new.detach())
    return torch.cat((read[..., :old, :], own), dim=2)
