"""Attention whose older tokens are kept once for a group of adjacent layers, in the place of a family's own.

A token is what the layer would cache of it before the rotation, [k ; v] of all KV heads without biases. Tokens that
`Reading` calls exact are read as they are; the others come back from the group's store. Biases, key norm and rotation
follow, so all of these are exact. Keys and queries are rotated by position: RoPE knows lags only, which padding before
a row does not change.

Shapes: B batch, T new tokens, K keys that are read, H query heads, G KV heads, d head_dim, D hidden size, n = 2Gd
elements of a token, r rank.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers import initialization as init

from .attention_functions import Accelerated, attend, begin_as, normalize_heads
from .cache_argument import takes_cache
from .cross_layer_entry import GroupEntry
from .group_cache import GroupLayer, Reading
from .group_stores import GroupStore, MergedPairs, PromptBasis, SharedCodes
from .layer_entry import head_dim_of, kv_heads_of
from .rotary import connect_rotary, rotation_of
from .step_memo import once


class GroupMember(Accelerated, nn.Module):
    """Base of every attention module of a group, whatever it caches of a token."""

    block: int | None

    def _join_group(self, entry: GroupEntry) -> None:
        self.entry, self.place, self.group_size = entry, entry.place, entry.group_size
        self.block, self.exact_sinks, self.window = entry.block, entry.sinks, entry.window

    @classmethod
    def new_store(cls, entry: GroupEntry, config: Any) -> GroupStore:
        """Make an empty store for a group of layers with this entry."""
        return SharedCodes(entry.group_size, entry.rank)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Encode a block of the layer's tokens [B, 1, C, n] for the store."""
        return tokens

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Its tokens [B, 1, ·, n] from what the store gives."""
        return stored

    def _group_layer(self, cache: Cache | None) -> GroupLayer:
        layer = None if cache is None else cache.layers[self.layer_idx]
        if not isinstance(layer, GroupLayer):
            raise ValueError(
                f"layer {self.layer_idx} shares a basis with other layers and needs their cache: call the whole model, "
                "without gradient checkpointing"
            )
        return layer

    def _reading(
        self, hidden_states: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor], cache: Cache | None
    ) -> Reading:
        """Return the reading of the new tokens [B, T, D]; layers alike share one object, kept with what rotates all
        tokens."""
        layer, queries, device = self._group_layer(cache), hidden_states.shape[1], hidden_states.device
        key = Reading, layer.block, layer.sinks, layer.window, device
        return once(embeddings[0], key, lambda: layer.reading(queries, device), step=layer.seen)

    def _exchange(
        self,
        reading: Reading,
        tokens: torch.Tensor,
        beside: torch.Tensor,
        cache: Cache | None,
        real: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens [B, 1, T, n] to the cache and returns the tokens of all keys that are read [B, 1, K, n].

        `beside` [B, 1, T, ·] is kept of every token as it is; the last result is that of all positions. `real` [B, T]
        is false at padding, which must not weigh in a basis.
        """
        layer = self._group_layer(cache)
        if real is not None:
            tokens = tokens * real[:, None, :, None].to(tokens.dtype)
        exact, beside = cache.update(tokens, beside, self.layer_idx)
        read = exact
        if reading.rebuilt[0] < reading.rebuilt[1]:
            read = torch.cat([self.decode(layer.store.read(self.place, *reading.rebuilt)), exact], dim=-2)
        layer.settle(self.encode)
        return read, beside


class SharedBasis(GroupMember):
    r"""One of W layers that share a basis which calibration found: xKV (arXiv:2503.18893), made static.

    With z_i the token of the group's layer i, c = Σ_i basis_down_i z_i is kept once, and layer i reads
    ẑ_i = basis_up_i c.
    """

    def _add_basis(self, width: int) -> None:
        self.basis_down = nn.Parameter(torch.empty(self.entry.rank, width))
        self.basis_up = nn.Parameter(torch.empty(width, self.entry.rank))

    def initialize_weights(self) -> None:
        """Fill what the base model's own initialization does not know; loaded tensors are left alone."""
        init.normal_(self.basis_down, std=self.config.initializer_range)
        init.normal_(self.basis_up, std=self.config.initializer_range)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """The layer's share of the shared latents [B, 1, C, r]."""
        return nn.functional.linear(tokens, self.basis_down)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Tokens [B, 1, ·, n] of shared latents [B, 1, ·, r]."""
        return nn.functional.linear(stored, self.basis_up)


class CrossLayerAttention(SharedBasis):
    """Attention over keys and values of one basis that W layers share."""

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
        """Take the rotary embedding."""
        connect_rotary(self, decoder)

    @property
    def width(self) -> int:
        """Elements of a token."""
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
        """hidden_states [B, T, D] → output [B, T, D] and, if eager, weights [B, H, T, K].

        `all_position_embeddings` are cos and sin [1, S, d] of all positions up to the last token, from
        `BlockwiseDecoder`; `real_tokens` bool [B, T] is false at padding, None if there is none.
        """
        batch, num_tokens, _ = hidden_states.shape
        (keys, key_bias), (values, value_bias) = (_unbiased(each, hidden_states) for each in (self.k_proj, self.v_proj))
        tokens, biases = torch.cat([keys, values], dim=-1).unsqueeze(1), (key_bias, value_bias)
        reading = self._reading(hidden_states, all_position_embeddings, cache)
        if self.kernel is not None:
            query = self._query(hidden_states, all_position_embeddings)
            out = self.kernel(self, query, tokens, biases, attention_mask, cache, real_tokens, reading)
            if out is not None:
                return self.o_proj(out.reshape(batch, num_tokens, -1)), None
        tokens, _ = self._exchange(reading, tokens, tokens[..., :0], cache, real_tokens)

        query = self._query(hidden_states, all_position_embeddings)
        cos, sin = all_position_embeddings
        key, value = self._key_value(tokens, biases)
        key = self.rotate(key, cos[:, reading.positions], sin[:, reading.positions])

        out, weights = attend(self, query, key, value, reading.select(attention_mask), **kwargs)  # [B, T, H, d]
        return self.o_proj(out.reshape(batch, num_tokens, -1)), weights

    def _query(self, hidden_states: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Queries [B, H, T, d] of the newest tokens [B, T, D], rotated to the last of the positions."""
        query = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        query = normalize_heads(self.q_norm, query)
        cos, sin = (each[:, -hidden_states.shape[1] :] for each in embeddings)
        return self.rotate(query.transpose(1, 2), cos, sin)

    def _key_value(
        self, tokens: torch.Tensor, biases: tuple[torch.Tensor | None, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, normalized and not yet rotated, and values [B, G, K, d] of tokens [B, 1, K, n] and biases [G·d]."""
        parts = []
        for part, bias in zip(tokens.squeeze(1).chunk(2, dim=-1), biases, strict=True):
            part = part if bias is None else part + bias
            parts.append(part.unflatten(-1, (self.num_kv_heads, self.head_dim)))
        key, value = parts
        return normalize_heads(self.k_norm, key).transpose(1, 2), value.transpose(1, 2)


class PromptBasisAttention(CrossLayerAttention):
    """A basis of each prompt's own, as xKV is published: nothing in the weights, the basis is in the cache.

    The first forward pass reads its tokens exactly and is compressed after it; tokens that come later stay exact.
    """

    def _add_basis(self, width: int) -> None:
        pass

    def initialize_weights(self) -> None:
        """Nothing to fill."""

    @classmethod
    def new_store(cls, entry: GroupEntry, config: Any) -> GroupStore:
        """Make an empty store that finds its own basis."""
        width = kv_heads_of(config) * head_dim_of(config)
        return PromptBasis(entry.group_size, width, entry.key_rank, entry.value_rank)

    encode, decode = GroupMember.encode, GroupMember.decode


class MergedPairAttention(CrossLayerAttention):
    """Two layers merged token by token: MiniCache (arXiv:2405.14366)."""

    def _add_basis(self, width: int) -> None:
        pass

    def initialize_weights(self) -> None:
        """Nothing to fill."""

    @classmethod
    def new_store(cls, entry: GroupEntry, config: Any) -> GroupStore:
        """Make an empty store of merged pairs."""
        heads = kv_heads_of(config)
        return MergedPairs(heads, heads * head_dim_of(config), entry.block, entry.kept, entry.interpolation)

    encode, decode = GroupMember.encode, GroupMember.decode


def _unbiased(projection: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[B, T, D] through a projection without its bias, and the bias; None where it has none.

    Where something wraps the projection or hooks into its call (adapters, offloading, sharding, quantized weights), it
    is called, once: the bias is then what becomes of a zero token behind the others, and taking it off rounds.
    """
    if projection.bias is None:
        return projection(hidden_states), None
    if type(projection) is nn.Linear and not (projection._forward_pre_hooks or hasattr(projection, "_hf_hook")):
        return nn.functional.linear(hidden_states, projection.weight), projection.bias
    projected, bias = projection(nn.functional.pad(hidden_states, (0, 0, 0, 1))).split((hidden_states.shape[1], 1), 1)
    bias = bias[0, 0]
    return projected - bias, bias
