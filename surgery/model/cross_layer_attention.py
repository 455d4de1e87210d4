"""Attention that stores older tokens once for a group of adjacent layers, as a replacement of a family's own attention.

A token is its keys and values before rotation, [k ; v] of all KV heads without biases. The `exact` tokens of a
`Reading` are read in full precision, the others from the group's store. Biases, key norm and rotation are applied after
that, so they add no error. Keys and queries are rotated by their position in the cache: RoPE depends on distances
alone, which left padding does not change.

Shapes: B batch, T new tokens, K keys, H query heads, G KV heads, d head_dim, D hidden size, n = 2Gd elements of a
token, r rank.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers import initialization as init

from .attention_functions import ConvertedAttention, attend, begin_as, normalize_heads
from .cache_argument import takes_cache
from .cross_layer_entry import GroupEntry
from .group_cache import GroupLayer, Reading
from .group_stores import GroupStore, MergedPairs, PromptBasis, SharedCodes
from .layer_entry import head_dim_of, kv_heads_of
from .rotary import connect_rotary, rotation_of
from .step_memo import once


class GroupMember(ConvertedAttention, nn.Module):
    """Base class of the attention modules of a group."""

    block: int | None

    def _join_group(self, entry: GroupEntry) -> None:
        self.entry, self.index_in_group, self.group_size = entry, entry.index_in_group, entry.group_size
        self.block, self.exact_sinks, self.window = entry.block, entry.sinks, entry.window

    @classmethod
    def new_store(cls, entry: GroupEntry, config: Any) -> GroupStore:
        """Make an empty store for a group of layers with this entry."""
        return SharedCodes(entry.group_size, entry.rank)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Encode a block of the layer's tokens [B, 1, C, n] for the store."""
        return tokens

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Decode the layer's tokens [B, 1, ·, n] from the store's output."""
        return stored

    def _group_layer(self, cache: Cache | None) -> GroupLayer:
        layer = None if cache is None else cache.layers[self.layer_idx]
        if not isinstance(layer, GroupLayer):
            raise ValueError(
                f"layer {self.layer_idx} shares a basis with other layers and needs their cache; call the whole model, "
                "without gradient checkpointing"
            )
        return layer

    def _reading(
        self, hidden_states: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor], cache: Cache | None
    ) -> Reading:
        """Return the `Reading` of the new tokens [B, T, D], shared by all layers with equal settings."""
        layer, queries, device = self._group_layer(cache), hidden_states.shape[1], hidden_states.device
        key = Reading, layer.block, layer.sinks, layer.window, device
        return once(embeddings[0], key, lambda: layer.reading(queries, device), step=layer.seen)

    def _update_cache(
        self,
        reading: Reading,
        tokens: torch.Tensor,
        extra: torch.Tensor,
        cache: Cache | None,
        real: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens [B, 1, T, n] to the cache; return the tokens of all keys [B, 1, K, n], and all of `extra`.

        `extra` [B, 1, T, ·], further elements of each token, is cached unchanged. `real` [B, T] is false at padding,
        whose tokens are set to zero so that they do not affect a basis.
        """
        layer = self._group_layer(cache)
        if real is not None:
            tokens = tokens * real[:, None, :, None].to(tokens.dtype)
        exact, extra = cache.update(tokens, extra, self.layer_idx)
        read = exact
        if reading.rebuilt[0] < reading.rebuilt[1]:
            read = torch.cat([self.decode(layer.store.read(self.index_in_group, *reading.rebuilt)), exact], dim=-2)
        layer.settle(self.encode)
        return read, extra


class SharedBasis(GroupMember):
    r"""One of W layers that share a basis found by calibration: xKV (arXiv:2503.18893) with a static basis.

    With z_i the token in layer i of the group, c = Σ_i basis_down_i z_i is stored once, and layer i reads
    ẑ_i = basis_up_i c.
    """

    def _add_basis(self, width: int) -> None:
        self.basis_down = nn.Parameter(torch.empty(self.entry.rank, width))
        self.basis_up = nn.Parameter(torch.empty(width, self.entry.rank))

    def initialize_weights(self) -> None:
        """Initialize tensors that the base model does not have; loaded tensors stay unchanged."""
        init.normal_(self.basis_down, std=self.config.initializer_range)
        init.normal_(self.basis_up, std=self.config.initializer_range)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the layer's contribution to the shared latents [B, 1, C, r]."""
        return nn.functional.linear(tokens, self.basis_down)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Rebuild tokens [B, 1, ·, n] from shared latents [B, 1, ·, r]."""
        return nn.functional.linear(stored, self.basis_up)


class CrossLayerAttention(SharedBasis):
    """Attention over keys and values in a basis shared by W layers."""

    def __init__(self, stock: nn.Module, entry: GroupEntry):
        begin_as(self, stock)
        self._join_group(entry)
        self.num_key_value_groups = self.num_heads // self.num_kv_heads
        self.rotate = rotation_of(stock)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", *(["sinks"] if hasattr(stock, "sinks") else [])):
            setattr(self, name, getattr(stock, name))
        self.q_norm = getattr(stock, "q_norm", None)
        self.k_norm = getattr(stock, "k_norm", None)
        self.rotary: tuple[nn.Module, ...] = ()
        self._add_basis(self.width)

    def connect(self, decoder: nn.Module, shared_latents: dict[int, torch.Tensor]) -> None:
        """Store a reference to the rotary embedding."""
        connect_rotary(self, decoder)

    @property
    def width(self) -> int:
        """Number of elements of a token."""
        return 2 * self.num_kv_heads * self.head_dim

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        all_position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        real_tokens: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the output [B, T, D] of hidden_states [B, T, D] and, if eager, weights [B, H, T, K].

        `all_position_embeddings` are cos and sin [1, S, d] of all positions up to the last token, from
        `BlockwiseDecoder`; `real_tokens` bool [B, T] is false at padding, None without padding.
        """
        batch, num_tokens, _ = hidden_states.shape
        (keys, key_bias), (values, value_bias) = (_unbiased(each, hidden_states) for each in (self.k_proj, self.v_proj))
        tokens, biases = torch.cat([keys, values], dim=-1).unsqueeze(1), (key_bias, value_bias)
        reading = self._reading(hidden_states, all_position_embeddings, cache)
        tokens, _ = self._update_cache(reading, tokens, tokens[..., :0], cache, real_tokens)

        query = self._query(hidden_states, all_position_embeddings)
        cos, sin = all_position_embeddings
        key, value = self._key_value(tokens, biases)
        key = self.rotate(key, cos[:, reading.positions], sin[:, reading.positions])

        out, weights = attend(self, query, key, value, reading.select(attention_mask), **kwargs)  # [B, T, H, d]
        return self.o_proj(out.reshape(batch, num_tokens, -1)), weights

    def _query(self, hidden_states: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Compute rotated queries [B, H, T, d] of the new tokens [B, T, D], at the last T positions."""
        query = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        query = normalize_heads(self.q_norm, query)
        cos, sin = (each[:, -hidden_states.shape[1] :] for each in embeddings)
        return self.rotate(query.transpose(1, 2), cos, sin)

    def _key_value(
        self, tokens: torch.Tensor, biases: tuple[torch.Tensor | None, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Split tokens [B, 1, K, n] into normalized, unrotated keys and values [B, G, K, d]; biases are [G·d]."""
        parts = []
        for part, bias in zip(tokens.squeeze(1).chunk(2, dim=-1), biases, strict=True):
            part = part if bias is None else part + bias
            parts.append(part.unflatten(-1, (self.num_kv_heads, self.head_dim)))
        key, value = parts
        return normalize_heads(self.k_norm, key).transpose(1, 2), value.transpose(1, 2)


class PromptBasisAttention(CrossLayerAttention):
    """Attention with a basis computed from each prompt, as xKV is published; the basis is in the cache.

    The first forward pass reads full-precision tokens and is compressed afterwards. Later tokens are not compressed.
    """

    def _add_basis(self, width: int) -> None:
        pass

    def initialize_weights(self) -> None:
        """Do nothing: the weights have no basis."""

    @classmethod
    def new_store(cls, entry: GroupEntry, config: Any) -> GroupStore:
        """Make an empty store that computes its basis from the prompt."""
        width = kv_heads_of(config) * head_dim_of(config)
        return PromptBasis(entry.group_size, width, entry.key_rank, entry.value_rank)

    encode, decode = GroupMember.encode, GroupMember.decode


class MergedPairAttention(CrossLayerAttention):
    """Attention of two layers whose tokens are merged: MiniCache (arXiv:2405.14366)."""

    def _add_basis(self, width: int) -> None:
        pass

    def initialize_weights(self) -> None:
        """Do nothing: the weights have no basis."""

    @classmethod
    def new_store(cls, entry: GroupEntry, config: Any) -> GroupStore:
        """Make an empty store of merged pairs."""
        heads = kv_heads_of(config)
        return MergedPairs(heads, heads * head_dim_of(config), entry.block, entry.kept, entry.interpolation)

    encode, decode = GroupMember.encode, GroupMember.decode


def _unbiased(projection: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Project [B, T, D] without the bias; return the result and the bias, or None without one.

    A projection with hooks or a wrapper (adapters, offloading, sharding, quantized weights) must be called, and only
    once: the output of an appended zero token is then the bias. Subtracting it rounds.
    """
    if projection.bias is None:
        return projection(hidden_states), None
    if type(projection) is nn.Linear and not (projection._forward_pre_hooks or hasattr(projection, "_hf_hook")):
        return nn.functional.linear(hidden_states, projection.weight), projection.bias
    projected, bias = projection(nn.functional.pad(hidden_states, (0, 0, 0, 1))).split((hidden_states.shape[1], 1), 1)
    bias = bias[0, 0]
    return projected - bias, bias
