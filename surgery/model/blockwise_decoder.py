"""A family's decoder that processes its input block by block, for caches shared by layers.

A token can be stored only after the last layer of its group. So the decoder splits every input at the block boundaries
of the cache. One pass over a text, a prompt in chunks, and decoding token by token then compute the same function.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from .cache_argument import CACHE, takes_cache
from .cache_layer import equivalent, is_empty
from .configuration_surgery import SurgeryConfig
from .cross_layer_attention import GroupMember
from .group_cache import GroupLayer
from .layer_entry import LayerEntry, StockEntry
from .parts import attention_class, entries_of
from .plain_cache import PlainLayer
from .rotary import rotary_of


class BlockwiseDecoder(nn.Module):
    """Mixin that `family_attention_class` puts before a family's decoder class."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: tensors are the family's own, and its weight conversions (fused experts) apply."""
        return False

    @takes_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Compute the final hidden states [B, T, D] of input_ids [B, T], or of inputs_embeds [B, T, D].

        Positions are indices in the cache. `position_ids`, which may restart after left padding, are used only for
        learned positions. Packed rows are not supported.

        Raises:
            ValueError: attentions or router logits are requested, the mask is not [B, S], or the cache is of another
                kind.
        """
        if kwargs.get("output_attentions") or kwargs.get("output_router_logits"):
            raise ValueError("output_attentions and output_router_logits need unshared caches; leave them out")
        given_cache, cache = cache, DynamicCache(config=self.config) if cache is None else cache
        self._adopt(cache)
        if attention_mask is not None and getattr(attention_mask, "ndim", None) != 2:
            raise ValueError("layers that share a cache need a 2D attention_mask [batch, tokens]")
        kwargs.pop("return_dict", None)
        inputs = input_ids if input_ids is not None else inputs_embeds
        first, stop = cache.get_seq_length(), cache.get_seq_length() + inputs.shape[1]
        mask = attention_mask
        # No mask without padding; a decode step skips the check, which waits for the device.
        if mask is not None and inputs.shape[1] > 1 and mask.all():
            mask = None
        # The rotary embedding reads only dtype and device.
        like = torch.empty(0, dtype=self.embed_tokens.weight.dtype, device=inputs.device)
        states, layers = [], []
        for start, end in pairwise(self._boundaries(first, stop)):
            piece = slice(start - first, end - first)
            positions = torch.arange(end, device=inputs.device)[None]
            embeddings = rotary_of(self)(like, position_ids=positions)
            learned = position_ids is not None and hasattr(self, "embed_positions")
            output = super().forward(
                input_ids=None if input_ids is None else input_ids[:, piece],
                inputs_embeds=None if inputs_embeds is None else inputs_embeds[:, piece],
                attention_mask=None if mask is None else mask[:, :end],
                position_ids=position_ids[:, piece] if learned else positions[:, start:],
                use_cache=True,
                all_position_embeddings=embeddings,
                return_dict=True,
                real_tokens=None if mask is None else mask[:, start:end].bool(),
                **{CACHE: cache},
                **kwargs,
            )
            states.append(output.last_hidden_state)
            layers.append(output.hidden_states)
        hidden_states = None
        if layers[0] is not None:
            hidden_states = tuple(torch.cat(parts, dim=1) for parts in zip(*layers, strict=True))
        return BaseModelOutputWithPast(
            last_hidden_state=torch.cat(states, dim=1),
            hidden_states=hidden_states,
            **{CACHE: cache if use_cache or given_cache is not None else None},
        )

    def members(self) -> list[tuple[int, GroupMember]]:
        """Return the attention modules of groups with their layer indices."""
        attentions = [layer.self_attn for layer in self.layers]
        return [(index, module) for index, module in enumerate(attentions) if isinstance(module, GroupMember)]

    def _boundaries(self, first: int, stop: int) -> list[int]:
        """Return `first`, all block boundaries in between, and `stop`."""
        block = self.members()[0][1].block
        if block is None:
            return [first, stop]
        return [first, *range((first // block + 1) * block, stop, block), stop]

    def cache_layers(self) -> list[CacheLayerMixin]:
        """Make empty cache layers for this decoder."""
        return group_layers(self.config, [getattr(layer.self_attn, "entry", StockEntry()) for layer in self.layers])

    def _adopt(self, cache: Cache) -> None:
        """Install `cache_layers` in an empty cache, unless it has equivalent layers.

        Raises:
            ValueError: a cache of another kind.
        """
        layers, cached = self.cache_layers(), cache.layers
        if len(cached) == len(layers) and all(map(equivalent, cached, layers)):
            return
        if type(cache) is not DynamicCache or cache.offloading or not is_empty(cache):
            raise ValueError(
                f"shared caches cannot continue from this {type(cache).__name__}; pass no cache, "
                "an empty DynamicCache without offloading, or the cache that the model returned"
            )
        cache.layers, cache.layer_class_to_replicate = layers, None


def group_layers(config: Any, entries: Sequence[LayerEntry]) -> list[CacheLayerMixin]:
    """Make empty cache layers for a decoder with these entries; `config` has its head sizes."""
    layers, store = [], None
    for entry in entries:
        if not entry.shares_cache:
            layers.append(PlainLayer())
            continue
        store = attention_class(entry).new_store(entry, config) if entry.index_in_group == 0 else store
        layers.append(GroupLayer(store, entry.index_in_group, entry.block, entry.sinks, entry.window))
    return layers


def kv_cache_bytes(
    config: SurgeryConfig, batch: int, tokens: int, dtype: torch.dtype, prompt: int | None = None
) -> int:
    """Predict the bytes of a cache shared by layers, see `SurgeryForCausalLM.kv_cache_bytes`."""
    entries, total = entries_of(config), 0
    for layer, entry in zip(group_layers(config, entries), entries, strict=True):
        heads, key_dim, value_dim = entry.cached_shape(config)
        size = {"batch": batch, "heads": heads, "key_dim": key_dim, "value_dim": value_dim, "dtype": dtype}
        first = {"prompt": prompt} if isinstance(layer, GroupLayer) else {}
        total += layer.predicted_bytes(tokens, **size, **first)
    return total
