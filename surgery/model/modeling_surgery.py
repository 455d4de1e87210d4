"""A stock decoder with a converted attention in place of its own.

Everything around the attention (embeddings, norms, MLPs, experts) is the source family's own code.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from functools import partial
from typing import ClassVar

import torch
from torch import nn
from transformers import MODEL_MAPPING, Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .attention_functions import family_attention_class
from .blockwise_decoder import BlockwiseDecoder
from .cache_layer import Call, CompactLayer, check_full_attention, hook_calls, own_cache
from .configuration_surgery import SurgeryConfig
from .cross_layer_attention import CrossLayerAttention, MergedPairAttention, PromptBasisAttention
from .cross_layer_latent_attention import CrossLayerLatentAttention
from .exact_window_cache import ExactWindowLayer, set_padding
from .group_entries import CROSS_LAYER_KEYS
from .grouped_attention import GroupedAttention
from .latent_attention import LatentAttention
from .low_rank_attention import LowRankAttention

ATTENTION: dict[str, type[nn.Module]] = {
    "latent": LatentAttention,
    "low_rank": LowRankAttention,
    "grouped": GroupedAttention,
    "cross_layer": CrossLayerAttention,
    "cross_layer_latent": CrossLayerLatentAttention,
    "cross_layer_prompt": PromptBasisAttention,
    "cross_layer_pairs": MergedPairAttention,
}
"""Attention modules by the `kind` of a layer's entry in `attention_layers`."""


class SurgeryForCausalLM(PreTrainedModel, GenerationMixin):
    """The source family's causal language model with a converted attention in the layers that `attention_layers` names.

    Tensors keep the source's names; those of an attention that was converted are listed in its class.
    """

    config_class = SurgeryConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ("past_key_values",)
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Flash attention wants keys and values of one width, at most 256.
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: SurgeryConfig):
        if config.attention_layers is None:
            raise ValueError("the configuration has no attention_layers: it describes no converted model")
        # Before super() fills in defaults: whether there are experts to run, only the base model knows.
        base_config = config.base_config()
        super().__init__(config)
        base_config._attn_implementation = config._attn_implementation
        # A PreTrainedModel of its own, under its own model_type, so that transformers' conversion of per-expert
        # checkpoint tensors still applies to it.
        decoder_class = MODEL_MAPPING[type(base_config)]
        if any(entry and entry["kind"] in CROSS_LAYER_KEYS for entry in config.attention_layers):
            check_full_attention(config, "a cache that layers share")
            decoder_class = family_attention_class(BlockwiseDecoder, decoder_class)
        self.model = decoder_class(base_config)
        config._experts_implementation = base_config._experts_implementation
        for layer, entry in zip(self.model.layers, config.attention_layers, strict=True):
            if entry is not None:
                attention_class = family_attention_class(ATTENTION[entry["kind"]], type(layer.self_attn))
                layer.self_attn = attention_class(layer.self_attn, entry)
        self._connect()
        if self.cache_layers() is not None:
            check_full_attention(config, "a cache in another form than plain keys and values")
            # On the decoder, because whoever calls it without the head must read the same cache.
            hook_calls(self.model, partial(_use_cache_layers, config))
        # The family's tensor-parallel plan splits heads, which a shared latent cannot follow.
        self.model._tp_plan = {name: plan for name, plan in self.model._tp_plan.items() if ".self_attn." not in name}
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _connect(self) -> None:
        """Give the attention modules what they share: the rotary embedding, and latents that are read across layers."""
        handed_on: dict[int, torch.Tensor] = {}
        for layer in self.model.layers:
            attention = layer.self_attn
            if isinstance(attention, LowRankAttention):
                attention.rotary, attention.handed_on = (self.model.rotary_emb,), handed_on
                for index in range(attention.layer_idx - attention.shared_layers, attention.layer_idx):
                    self.model.layers[index].self_attn.hands_on = True
        self._handed_on = handed_on

    def cache_layers(self) -> list[CompactLayer] | None:
        """New, empty layers of the cache that this model keeps; None where those of a plain `DynamicCache` do."""
        return _cache_layers(self.config)

    def kv_cache_bytes(self, batch: int, tokens: int) -> int:
        """Bytes that the live cache will hold after `tokens` tokens of each of `batch` rows, in the model's dtype."""
        if isinstance(self.model, BlockwiseDecoder):
            return self.model.kv_cache_bytes(batch, tokens)
        total = 0
        layers = self.cache_layers() or DynamicCache(config=self.config).layers
        for layer, block in zip(layers, self.model.layers, strict=True):
            heads, key_dim, value_dim = _cached_shape(block.self_attn)
            if isinstance(layer, CompactLayer):
                size = {"batch": batch, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
                total += layer.predicted_bytes(tokens, **size, dtype=self.dtype)
            else:
                # A full window keeps one token less than a query sees, its own.
                kept = min(tokens, layer.sliding_window - 1) if layer.is_sliding else tokens
                total += batch * kept * heads * (key_dim + value_dim) * self.dtype.itemsize
        return total

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers would search this file for experts; those of a mixture are in the base family's.
        return True

    @torch.no_grad()
    def initialize_weights(self) -> None:
        super().initialize_weights()
        # transformers hands the inside of `self.model` to the base family's `_init_weights`, which knows none of ours.
        for module in self.modules():
            if isinstance(module, tuple(ATTENTION.values())):
                module.initialize_weights()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """input_ids [B, T] → logits [B, T, vocab], of the last `logits_to_keep` tokens if that is not 0."""
        # The base model looks these up in its own config, and users set them on this one.
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        kwargs.setdefault("output_hidden_states", self.config.output_hidden_states)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=self.config.use_cache if use_cache is None else use_cache,
            return_dict=True,
            **kwargs,
        )
        if not (self.training and self.is_gradient_checkpointing):
            self._handed_on.clear()  # the cache has them; a backward pass that computes layers again needs them here
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _cache_layers(config: SurgeryConfig, *, training: bool = False) -> list[CompactLayer] | None:
    quantizes = config.kv_cache is not None and not training
    if not quantizes and not config.exact_window:
        return None
    layers = []
    for entry in config.attention_layers:
        quantized = config.quantized_layer() if quantizes else None
        if config.exact_window:
            layers.append(ExactWindowLayer(entry["sinks"], entry["window"], quantized))
        else:
            layers.append(quantized)
    return layers


def _use_cache_layers(config: SurgeryConfig, decoder: nn.Module, call: Call) -> None:
    """Have a call of the decoder read and fill the layers that the configuration asks for; training reads no codes."""
    layers = _cache_layers(config, training=decoder.training)
    if layers is not None:
        cache = own_cache(decoder, call, layers)
        if config.exact_window:
            set_padding(cache, call.get("attention_mask"))


def _cached_shape(attention: nn.Module) -> tuple[int, int, int]:
    """Heads of one token in the cache, and the widths of what each has in the place of a key and of a value."""
    if isinstance(attention, tuple(ATTENTION.values())):
        return attention.cached_shape
    return attention.config.num_key_value_heads, attention.head_dim, attention.head_dim


__all__ = ["SurgeryForCausalLM"]
