"""How a family's decoder gets converted attention and the cache that this reads, whatever model it is in.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from .attention_choice import check_attention, check_weights, flash_problem
from .attention_functions import family_attention_class, is_flash, own_softmax
from .axis_decoder import AXIS_FAMILIES, AxisDecoder
from .cache_argument import CACHE, CACHE_NAMES
from .cache_layer import Call, CompactLayer, check_full_attention, hook_calls, own_cache
from .configuration_surgery import SurgeryConfig
from .cross_layer_attention import CrossLayerAttention, MergedPairAttention, PromptBasisAttention
from .cross_layer_latent_attention import CrossLayerFamilyLatents, CrossLayerLatentAttention
from .exact_window_cache import ExactWindowLayer
from .family_decoders import DECODERS, NoRotation, PlacedDecoder
from .group_entries import CROSS_LAYER_KEYS
from .grouped_attention import GroupedAttention
from .hybrid_attention import HybridAttention
from .hybrid_cache import HybridLayer, PlainLayer, StreamingLayer
from .latent_attention import LatentAttention
from .left_padding import set_padding
from .low_rank_attention import LowRankAttention
from .packed_rows import DocumentAttention, new_tokens, take_documents
from .straight_through import StraightThroughCodes, StraightThroughLayer

ATTENTION: dict[str, type[nn.Module]] = {
    "latent": LatentAttention,
    "low_rank": LowRankAttention,
    "grouped": GroupedAttention,
    "hybrid": HybridAttention,
    "cross_layer": CrossLayerAttention,
    "cross_layer_latent": CrossLayerLatentAttention,
    "cross_layer_mla": CrossLayerFamilyLatents,
    "cross_layer_prompt": PromptBasisAttention,
    "cross_layer_pairs": MergedPairAttention,
}
"""Attention modules by the `kind` of a layer's entry in `attention_layers`."""


class ConvertedModel:
    """Mixed into classes of whole models, before `PreTrainedModel` in their bases."""

    supports_gradient_checkpointing = True
    _skip_keys_device_placement = CACHE_NAMES
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _supports_flex_attn = False

    def _take_attention(self, config: SurgeryConfig, decoder: type[nn.Module]) -> None:
        """Have transformers know what runs, before it looks at the `attn_implementation` of a new model."""
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
            if isinstance(module, tuple(ATTENTION.values())):
                module.initialize_weights()


def family_decoder_class(model_type: str, decoder: type[nn.Module]) -> type[nn.Module]:
    """A family's decoder class, or the same with what converted attention asks for."""
    own = DECODERS.get(model_type)
    if model_type == "granitemoehybrid":
        own = PlacedDecoder
    if model_type in AXIS_FAMILIES:
        own = AxisDecoder
    return decoder if own is None else family_attention_class(own, decoder)


def convert_decoder(decoder: nn.Module, config: SurgeryConfig) -> None:
    """Puts converted attention into the layers of a family's decoder that `attention_layers` names, and its cache.

    Raises:
        ValueError: the family's layers cannot keep such a cache.
    """
    for layer, entry in zip(decoder.layers, config.attention_layers, strict=True):
        if entry is not None:
            attention_class = family_attention_class(ATTENTION[entry["kind"]], type(layer.self_attn))
            layer.self_attn = attention_class(layer.self_attn, entry)
    _connect(decoder)
    if cache_layers(config) is not None:
        check_full_attention(config, "a cache in another form than plain keys and values")
        for index, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            attention.__class__ = family_attention_class(DocumentAttention, type(attention))
            attention.new_layer = partial(_cache_layer, config, index)
    # On the decoder, because whoever calls it without the head must read the same cache.
    hook_calls(decoder, partial(_prepare_call, config))
    decoder.quantization_aware = False
    # The family's tensor-parallel plan splits heads, which a shared latent cannot follow.
    split = {name: plan for name, plan in decoder._tp_plan.items() if ".self_attn." not in name}
    decoder._tp_plan = {name: plan for name, plan in split.items() if ".attention." not in name}


def _connect(decoder: nn.Module) -> None:
    """Give the attention modules what they share: the rotary embedding, and latents that are read across layers."""
    handed_on: dict[int, torch.Tensor] = {}
    for layer in decoder.layers:
        attention = getattr(layer, "self_attn", None)
        if isinstance(attention, LatentAttention) and isinstance(decoder, AxisDecoder):
            attention.rotary.axes = decoder.axes_of(attention.rotary.frequencies)
        if isinstance(attention, LowRankAttention | CrossLayerAttention):
            # Some families have a RoPE for each type of layer, and say its type.
            of_type = {"layer_type": kind} if (kind := getattr(attention, "rope_of", None)) else {}
            rotary = decoder.rotary_emb if decoder.rotary_emb is not None else NoRotation()
            attention.rotary = (partial(rotary, **of_type) if of_type else rotary,)
        if isinstance(attention, LowRankAttention):
            attention.handed_on = handed_on
            for index in range(attention.layer_idx - attention.shared_layers, attention.layer_idx):
                decoder.layers[index].self_attn.hands_on = True
    if any(getattr(layer.self_attn, "hands_on", False) for layer in decoder.layers if hasattr(layer, "self_attn")):
        decoder.register_forward_hook(partial(_forget, handed_on))


def _forget(handed_on: dict[int, torch.Tensor], decoder: nn.Module, args: tuple, output: Any) -> None:
    """Drops latents that the cache has; a backward pass that computes layers again needs them here."""
    if not (decoder.training and decoder.is_gradient_checkpointing):
        handed_on.clear()


def cache_layers(config: SurgeryConfig, *, training: bool = False, aware: bool = False) -> list[CompactLayer] | None:
    """New, empty layers of the cache that a model keeps; None where those of a plain `DynamicCache` do."""
    quantizes = config.kv_cache is not None and (aware or not training)
    if not (quantizes or config.exact_window or config.streams):
        return None
    return [_cache_layer(config, layer, training=training, aware=aware) for layer in range(config.num_hidden_layers)]


def _cache_layer(config: SurgeryConfig, layer: int, *, training: bool, aware: bool) -> CompactLayer:
    """A new layer for the attention that the entry of a layer describes."""
    entry = config.attention_layers[layer] or {}
    quantizes = config.kv_cache_of(layer) is not None and (aware or not training)
    whole = config.quantized_layer(layer) if quantizes else PlainLayer()
    codes = config.streaming_codes(layer) if quantizes else None
    if quantizes and aware:
        whole, codes = StraightThroughLayer(whole), StraightThroughCodes(codes)
    if entry.get("kind") == "hybrid":
        full, heads = entry["full_heads"], entry["kv_heads"]
        streaming = StreamingLayer(entry["sinks"], entry["recent"], entry["compensated_heads"], codes)
        return HybridLayer(whole if full else None, streaming if full < heads else None, heads=full)
    if settings := entry.get("streaming"):
        streaming = StreamingLayer(settings["sinks"], settings["recent"], codes=codes)
        if entry["kind"] == "latent":
            return streaming
        ranks = [block["rank"] for block in entry["blocks"]]
        width = sum(rank for number, rank in enumerate(ranks) if number not in settings["blocks"])
        return HybridLayer(whole if width else None, streaming, width=width)
    if entry.get("kind") == "low_rank" and entry["window"]:
        return ExactWindowLayer(entry["sinks"], entry["window"], whole if quantizes else None)
    return whole


def _prepare_call(config: SurgeryConfig, decoder: nn.Module, call: Call) -> None:
    """Refuse what a call of the decoder asks for in vain, and see to its documents and its cache."""
    implementation = decoder.config._attn_implementation
    check_attention(config, implementation, family_flash=decoder._supports_flash_attn)
    check_weights(config, decoder, call)
    documents = take_documents(decoder, call)
    if documents is None:
        _use_cache_layers(config, decoder, call)
        return
    if any(entry and entry["kind"] in CROSS_LAYER_KEYS for entry in config.attention_layers):
        raise ValueError("layers that share a cache cannot keep several documents of a row apart: pass one a row")
    if not all(hasattr(layer, "self_attn") for layer in decoder.layers):
        raise ValueError("layers that keep a state cannot keep several documents of a row apart: pass one a row")
    if is_flash(implementation) and len(new_tokens(call)) > 1:
        raise ValueError("FlashAttention reads documents off the positions of one row alone: pass a batch of one row")
    aware = decoder.training and decoder.quantization_aware
    if cache_layers(config, training=decoder.training, aware=aware) is not None:
        call |= {"documents": documents, "quantization_aware": aware}


def _use_cache_layers(config: SurgeryConfig, decoder: nn.Module, call: Call) -> None:
    """Have a call of the decoder read and fill the layers that the configuration asks for.

    Training reads exact tokens, or with `quantization_aware` what a quantised cache gives back.
    """
    training, aware = decoder.training, decoder.training and decoder.quantization_aware
    kept_as = config.attention_layers, config.kv_cache if aware or not training else None, aware
    cache = call.get(CACHE)
    if getattr(cache, "kept_as", None) == kept_as:
        cache.temporary = False  # its layers are of that form already
    else:
        layers = cache_layers(config, training=training, aware=aware)
        if layers is None:
            return
        cache = own_cache(decoder, call, layers)
        cache.kept_as = kept_as
    # Gradient checkpointing takes the cache away from the layers, and runs them again in the backward pass.
    if aware:
        call["quantization_aware"] = True
    if config.exact_window or config.streams:
        padding = set_padding(cache, call.get("attention_mask"), rows=len(new_tokens(call)))
        if padding is not None and training:
            call["left_padding"] = padding


__all__ = ["ATTENTION", "ConvertedModel", "cache_layers", "convert_decoder", "family_decoder_class"]
