"""Converted attention and its cache in a family's decoder, whatever model it is in.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from .attention_choice import check_attention, check_weights, flash_problem
from .attention_functions import ConvertedAttention, family_attention_class, is_flash, own_softmax
from .cache_argument import CACHE_NAMES
from .cache_layer import CacheLayer, Call, hook_calls
from .cache_prediction import CachedLayer
from .configuration_surgery import SurgeryConfig, check_config
from .packed_rows import new_tokens, take_documents
from .parts import DECODERS, attention_class, entries_of, has_compact_layers, part, parts_of


class ConvertedModel:
    """Mixed into classes of whole models, before `PreTrainedModel` in their bases."""

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = CACHE_NAMES
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _supports_flex_attn = False

    def _take_attention(self, config: SurgeryConfig, decoder: type[nn.Module]) -> None:
        """Have transformers know what runs, before it looks at the `attn_implementation` of a new model.

        Raises:
            ValueError: the code that the configuration asks for is not there, or it asks for what is impossible.
        """
        for name in sorted(parts_of(vars(config))):
            part(name)
        check_config(config)
        self._family_flash = decoder._supports_flash_attn
        self._converted = config
        self._supports_sdpa = not own_softmax(config)
        self._supports_flash_attn = flash_problem(config, self._family_flash) is None

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        check_attention(self._converted, attn_implementation, family_flash=self._family_flash)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        """Refuses continuous batching (`generate_batch`, `transformers serve`).

        Its pages hold plain keys and values of one shape in all layers, which this model does not cache.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "transformers' continuous batching keeps keys and values of one shape in pages, and this model caches "
            "something else: use generate() with a padded batch, or vLLM with the plugin of model-surgery"
        )

    @classmethod
    def is_backend_compatible(cls) -> bool:
        """Refuses engines that run transformers' classes with an attention and a cache of their own.

        vLLM asks where it finds no plugin for the class, and would cache keys and values.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "engines cannot run this model by transformers' classes, which would not use its smaller cache; vLLM "
            "runs it by the plugin of model-surgery: install model-surgery in vLLM's environment"
        )

    @torch.no_grad()
    def initialize_weights(self) -> None:
        super().initialize_weights()
        # transformers hands the inside of the decoder to the base family's `_init_weights`, which knows none of ours.
        for module in self.modules():
            if isinstance(module, ConvertedAttention):
                module.initialize_weights()


def family_decoder_class(model_type: str, decoder: type[nn.Module]) -> type[nn.Module]:
    """A family's decoder class, or the same with what converted attention asks for."""
    if (name := DECODERS.get(model_type)) is None:
        return decoder
    return family_attention_class(part(name).decoder_class(model_type), decoder)


def convert_decoder(decoder: nn.Module, config: SurgeryConfig) -> None:
    """Puts converted attention into the layers of a family's decoder that `attention_layers` names, and its cache.

    Raises:
        ValueError: the family's layers cannot keep such a cache.
    """
    compact = has_compact_layers(config)
    for layer, entry in zip(decoder.layers, entries_of(config), strict=True):
        if entry.kind is not None:
            converted = family_attention_class(attention_class(entry), type(layer.self_attn))
            layer.self_attn = converted(layer.self_attn, entry)
    _connect(decoder)
    if compact or config.kv_cache is not None:
        part("compact_caches").prepare_decoder(decoder, config)
    # On the decoder, because whoever calls it without the head must read the same cache.
    hook_calls(decoder, partial(_prepare_call, config, compact))
    # The family's tensor-parallel plan splits heads, which a shared latent cannot follow.
    split = {name: plan for name, plan in decoder._tp_plan.items() if ".self_attn." not in name}
    decoder._tp_plan = {name: plan for name, plan in split.items() if ".attention." not in name}


def _connect(decoder: nn.Module) -> None:
    """Give the attention modules what they share: the rotary embedding, and latents that are read across layers."""
    shared_latents: dict[int, torch.Tensor] = {}
    attentions = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
    for attention in attentions:
        if isinstance(attention, ConvertedAttention):
            attention.connect(decoder, shared_latents)
    if any(getattr(attention, "hands_on", False) for attention in attentions):
        decoder.register_forward_hook(partial(_forget, shared_latents))


def _forget(shared_latents: dict[int, torch.Tensor], decoder: nn.Module, args: tuple, output: Any) -> None:
    """Drops latents that the cache has; a backward pass that computes layers again needs them here."""
    if not (decoder.training and decoder.is_gradient_checkpointing):
        shared_latents.clear()


def cache_layers(config: SurgeryConfig) -> list[CacheLayer] | None:
    """New, empty layers of the cache that a model keeps; None where those of a plain `DynamicCache` do."""
    if not has_compact_layers(config) and config.kv_cache is None:
        return None
    return part("compact_caches").new_layers(config, training=False)


def cached_layers(config: Any, batch: int, dtype: torch.dtype) -> list[CachedLayer | None]:
    """Return what each layer of a model caches, if it shares no cache with others; None where one keeps a state."""
    layers = cache_layers(config) or DynamicCache(config=config).layers
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    return [
        None if kind in ("linear_attention", "mamba") else CachedLayer(layer, batch, *entry.cached_shape(config), dtype)
        for layer, entry, kind in zip(layers, entries_of(config), kinds, strict=True)
    ]


def _prepare_call(config: SurgeryConfig, compact: bool, decoder: nn.Module, call: Call) -> None:
    """Refuse what a call of the decoder asks for in vain, and see to its documents and its cache.

    `compact`: whether layers keep something else than keys and values of all tokens, quantized or not.
    """
    implementation = decoder.config._attn_implementation
    check_attention(config, implementation, family_flash=decoder._supports_flash_attn)
    check_weights(config, decoder, call)
    documents = take_documents(decoder, call)
    training = decoder.training
    has_own_cache = compact or (config.kv_cache is not None and not training)
    if documents is None:
        if has_own_cache:
            part("compact_caches").use_layers(config, decoder, call, training=training, padded=compact)
        return
    if any(entry.shares_cache for entry in entries_of(config)):
        raise ValueError("layers that share a cache cannot keep several documents of a row apart: pass one a row")
    if not all(hasattr(layer, "self_attn") for layer in decoder.layers):
        raise ValueError("layers that keep a state cannot keep several documents of a row apart: pass one a row")
    if is_flash(implementation) and len(new_tokens(call)) > 1:
        raise ValueError("FlashAttention reads documents off the positions of one row alone: pass a batch of one row")
    if has_own_cache:
        call["documents"] = documents


__all__ = ["ConvertedModel", "cache_layers", "cached_layers", "convert_decoder", "family_decoder_class"]
