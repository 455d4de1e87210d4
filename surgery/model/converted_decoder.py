"""Installation of converted attention and its cache in a family's decoder, in any model that contains it.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from .attention_choice import check_attention, check_weights, flash_problem
from .attention_functions import (
    ConvertedAttention,
    family_attention_class,
    has_learned_sinks,
    has_output_gate,
    is_flash,
    own_softmax,
)
from .cache_argument import CACHE_NAMES
from .cache_layer import CachedLayer, CacheLayer, Call, hook_calls
from .configuration_surgery import SurgeryConfig, check_config
from .packed_rows import new_tokens, take_documents
from .parts import DECODERS, attention_class, entries_of, has_compact_layers, part, parts_of


class ConvertedModel:
    """Mixin of whole models with a converted decoder; comes before `PreTrainedModel` in the bases."""

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = CACHE_NAMES
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _supports_flex_attn = False

    def _take_attention(self, config: SurgeryConfig, decoder: type[nn.Module]) -> None:
        """Set the attention flags that transformers checks `attn_implementation` of a new model against.

        Raises:
            ValueError: the config is invalid, or needs a part that the checkpoint ships without.
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
        """Refuse continuous batching (`generate_batch`, `transformers serve`).

        Its pages hold plain keys and values of one shape in all layers; this model's cache differs.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "continuous batching is not supported, as its pages hold keys and values and this model caches "
            "something else; use generate() with a padded batch, or vLLM with the plugin of model-surgery"
        )

    @classmethod
    def is_backend_compatible(cls) -> bool:
        """Refuse engines that run transformers' classes with their own attention and cache.

        vLLM calls this if no plugin registers the class; it would cache plain keys and values.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "this model cannot run on transformers' classes in an engine, which would not use its smaller cache; "
            "install model-surgery in vLLM's environment to use its plugin"
        )

    @torch.no_grad()
    def initialize_weights(self) -> None:
        super().initialize_weights()
        # For the decoder transformers calls the family's `_init_weights`, which does not know converted attention.
        for module in self.modules():
            if isinstance(module, ConvertedAttention):
                module.initialize_weights()


def family_decoder_class(model_type: str, decoder: type[nn.Module]) -> type[nn.Module]:
    """Return a family's decoder class, extended by its part in `parts.DECODERS` if it has one."""
    if (name := DECODERS.get(model_type)) is None:
        return decoder
    return family_attention_class(part(name).decoder_class(model_type), decoder)


def convert_decoder(decoder: nn.Module, config: SurgeryConfig) -> None:
    """Replace the attention in a family's decoder as set by `attention_layers`, and install its cache.

    Raises:
        ValueError: the family has layers that cannot use such attention or such a cache.
    """
    compact = has_compact_layers(config)
    for layer, entry in zip(decoder.layers, entries_of(config), strict=True):
        if entry.kind is not None:
            if not entry.has_gate and has_output_gate(layer.self_attn):
                raise ValueError(f"{entry.kind} does not support the output gate of {config.base_model_type}")
            if entry.streams and has_learned_sinks(config):
                raise ValueError("heads with learned sinks cannot stream")
            converted = family_attention_class(attention_class(entry), type(layer.self_attn))
            layer.self_attn = converted(layer.self_attn, entry)
    _connect(decoder)
    if compact or config.kv_cache is not None:
        part("compact_caches").prepare_decoder(decoder, config)
    # On the decoder, so that calls without the LM head use the same cache.
    hook_calls(decoder, partial(_prepare_call, config, compact))
    # The family's tensor-parallel plan shards heads; a shared latent cannot be sharded so.
    split = {name: plan for name, plan in decoder._tp_plan.items() if ".self_attn." not in name}
    decoder._tp_plan = {name: plan for name, plan in split.items() if ".attention." not in name}


def _connect(decoder: nn.Module) -> None:
    """Connect the attention modules to what they share: the rotary embedding, and latents read across layers."""
    shared_latents: dict[int, torch.Tensor] = {}
    attentions = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
    for attention in attentions:
        if isinstance(attention, ConvertedAttention):
            attention.connect(decoder, shared_latents)
    if any(getattr(attention, "shares_latents", False) for attention in attentions):
        decoder.register_forward_hook(partial(_drop_shared_latents, shared_latents))


def _drop_shared_latents(shared_latents: dict[int, torch.Tensor], decoder: nn.Module, args: tuple, output: Any) -> None:
    """Drop shared latents after a call, unless gradient checkpointing will recompute layers from them."""
    if not (decoder.training and decoder.is_gradient_checkpointing):
        shared_latents.clear()


def cache_layers(config: SurgeryConfig) -> list[CacheLayer] | None:
    """Make empty cache layers for a model; None if a plain `DynamicCache` suffices."""
    if not has_compact_layers(config) and config.kv_cache is None:
        return None
    return part("compact_caches").new_layers(config, training=False)


def cached_layers(config: Any, batch: int, dtype: torch.dtype) -> list[CachedLayer | None]:
    """Return the `CachedLayer` of every layer of a model; None for layers that keep a state."""
    layers = cache_layers(config) or DynamicCache(config=config).layers
    kinds = getattr(config, "layer_types", None) or [None] * len(layers)
    return [
        None if kind in ("linear_attention", "mamba") else CachedLayer(layer, batch, *entry.cached_shape(config), dtype)
        for layer, entry, kind in zip(layers, entries_of(config), kinds, strict=True)
    ]


def _prepare_call(config: SurgeryConfig, compact: bool, decoder: nn.Module, call: Call) -> None:
    """Check a call of the decoder, and set up its packed documents and its cache.

    `compact`: whether a layer caches something else than keys and values of all tokens, quantized or not.
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
    if not all(hasattr(layer, "self_attn") for layer in decoder.layers):
        raise ValueError("packed documents are not supported with recurrent layers; pass one document per row")
    if is_flash(implementation) and len(new_tokens(call)) > 1:
        raise ValueError("packed documents with FlashAttention need a batch size of 1")
    if has_own_cache:
        call["documents"] = documents
