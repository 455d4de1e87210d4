"""Latent attention that stores older latents once for a group of adjacent layers: xKV over MLA.

A token is the layer's latent: the output of `kv_down`, or of the latent norm in a family's own MLA. The rotated key and
the inverse rms of a key norm are cached unchanged by each layer.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Cache

from .attention_functions import attend, project_queries, rotate_pairs
from .cache_argument import CACHE, takes_cache
from .cross_layer_attention import SharedBasis
from .cross_layer_entry import GroupEntry
from .group_cache import Reading
from .latent_attention import LatentAttention


class LatentMember(SharedBasis):
    """One of W layers that share a basis of their latents."""

    def _join_group(self, entry: GroupEntry) -> None:
        super()._join_group(entry)
        self._add_basis(self.kv_lora_rank)


class CrossLayerLatentAttention(LatentMember, LatentAttention):
    """`LatentAttention` over latents in a basis shared by W layers."""

    def __init__(self, stock: nn.Module, entry: GroupEntry):
        LatentAttention.__init__(self, stock, entry)
        self._join_group(entry)

    def initialize_weights(self) -> None:
        """Initialize tensors that the base model does not have; loaded tensors stay unchanged."""
        LatentAttention.initialize_weights(self)
        LatentMember.initialize_weights(self)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        real_tokens: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        all_position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the output [B, T, D] of hidden_states [B, T, D] and, if eager, weights [B, H, T, K].

        `position_ids` are [1, T]. The family's cos and sin for a whole head are unused: latents have other frequencies.
        """
        batch, num_tokens, _ = hidden_states.shape
        cos, sin = self.rotary(position_ids)
        query, _ = project_queries(self, hidden_states)
        query = self._latent_query(query, cos, sin)
        latent, k_rope = self.kv_down(hidden_states).unsqueeze(1).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        positional = rotate_pairs(k_rope, cos, sin)
        if self.key_norm_eps is not None:
            positional = torch.cat((positional, self._key_irms(hidden_states)), dim=-1)
        reading = self._reading(hidden_states, all_position_embeddings, cache)
        latent, positional = self._update_cache(reading, latent, positional, cache, real_tokens)
        key_value = self._latent_key_value(latent, positional[:, :, reading.positions])
        out, weights = attend(self, query, *key_value, reading.select(attention_mask), **kwargs)  # [B, T, H, r]
        out = torch.einsum("bthr,hvr->bthv", out, self.value_up)
        return self.o_proj(out.reshape(batch, num_tokens, -1)), weights


class CrossLayerFamilyLatents(LatentMember):
    """A family's own MLA over latents in a basis shared by W layers.

    A token is the latent after its norm, as the family caches it. The forward pass is the family's; its cache update
    returns the tokens of the group.
    """

    def __init__(self, stock: nn.Module, entry: GroupEntry):
        # The class built by `family_attention_class` has the family's attention next in line.
        super().__init__(stock.config, stock.layer_idx)
        self._join_group(entry)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        real_tokens: torch.Tensor | None = None,
        all_position_embeddings: Any = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the output [B, T, D] of hidden_states [B, T, D] and, if eager, weights [B, H, T, K].

        `kwargs` hold the position arguments of the family.
        """
        reading = self._reading(hidden_states, all_position_embeddings, cache)
        return super().forward(
            hidden_states=hidden_states,
            attention_mask=reading.select(attention_mask),
            **{CACHE: _GroupReads(self, reading, cache, real_tokens)},
            **kwargs,
        )


class _GroupReads:
    """Adapter of a group's cache to the interface that a family's attention calls."""

    def __init__(self, member: LatentMember, reading: Reading, cache: Cache, real: torch.Tensor | None):
        self._member, self._reading, self._cache, self._real = member, reading, cache, real

    def update(self, latent: torch.Tensor, rotated: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Append latents and rotated keys [B, 1, T, ·]; return those of all keys [B, 1, K, r] and [B, 1, K, ρ]."""
        latent, rotated = self._member._update_cache(self._reading, latent, rotated, self._cache, self._real)
        return latent, rotated[:, :, self._reading.positions]
