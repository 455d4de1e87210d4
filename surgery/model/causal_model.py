"""Custom causal language model class: a stock decoder whose attention is replaced by converted attention.

Everything around the attention (embeddings, norms, MLPs, experts) is the source family's own code.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import MODEL_MAPPING, Cache, GenerationMixin, PreTrainedModel, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .cache_argument import CACHE, returned_cache, takes_cache
from .cache_layer import CacheLayer, CompactLayer
from .configuration_surgery import SurgeryConfig
from .converted_decoder import ConvertedModel, cache_layers, cached_layers, convert_decoder, family_decoder_class
from .logit_factor import logit_cap, logit_factor


class SurgeryForCausalLM(ConvertedModel, PreTrainedModel, GenerationMixin):
    """The source family's causal language model with converted attention in the layers set by `attention_layers`.

    Tensors keep the source's names; each attention class documents its own tensors.
    """

    config_class = SurgeryConfig
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    entry_class: ClassVar[Callable[[SurgeryConfig], type[PreTrainedModel]] | None] = None
    """Returns the class to instantiate for a config, from its entry module. Set by the package `surgery`; remote code
    has one entry module only."""
    on_device: ClassVar[Callable[[PreTrainedModel], Any] | None] = None
    """Called once per model, before its first inference call on CUDA. The package `surgery` sets it to install its
    kernels."""
    # MTP layers, which Qwen's checkpoints hold next to the model.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^mtp\."]

    def __new__(cls, config: SurgeryConfig | None = None, *args, **kwargs):
        """Instantiate the class of the entry module that `save_pretrained` writes; copies pass no config."""
        has_choice = cls is SurgeryForCausalLM and cls.entry_class is not None and config is not None
        return super().__new__(cls.entry_class(config) if has_choice else cls)

    def __init__(self, config: SurgeryConfig):
        if config.attention_layers is None:
            raise ValueError("attention_layers is missing from the config; this is not a converted model")
        # Before super() fills in defaults: only the base model knows whether there are experts.
        base_config = config.base_config()
        self._take_attention(config, MODEL_MAPPING[type(base_config)])
        super().__init__(config)
        base_config._attn_implementation = config._attn_implementation
        # The decoder is a PreTrainedModel with the family's model_type, so that transformers still converts per-expert
        # checkpoint tensors.
        decoder_class = family_decoder_class(config.base_model_type, MODEL_MAPPING[type(base_config)])
        self.model = decoder_class(base_config)
        self._is_stateful = self.model._is_stateful
        config._experts_implementation = base_config._experts_implementation
        convert_decoder(self.model, config)
        self._hooked_on: torch.device | None = None
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def cache_layers(self) -> list[CacheLayer] | None:
        """Make empty cache layers for this model; None if a plain `DynamicCache` suffices."""
        return cache_layers(self.config)

    def reserved_cache(self, tokens: int) -> Cache:
        """Make an empty cache with memory for `tokens` tokens of each row, which stays in place until it is full.

        A plain cache becomes a `StaticCache`, which holds no more tokens; all other caches can grow beyond `tokens`.
        """
        layers = self.cache_layers()
        if layers is None:
            return StaticCache(config=self.config, max_cache_len=tokens)
        for layer in layers:
            if isinstance(layer, CompactLayer):  # sliding windows have a fixed size
                layer.reserve(tokens)
        return Cache(layers=layers)

    def kv_cache_bytes(self, batch: int, tokens: int) -> int:
        """Predict the bytes of the cache after `tokens` tokens of each of `batch` rows, in the model's dtype.

        States of linear attention are not counted, since they do not grow.
        """
        return sum(self.kv_layer_bytes(batch, tokens))

    def kv_layer_bytes(self, batch: int, tokens: int) -> list[int]:
        """Predict the cache bytes of every layer."""
        return [0 if layer is None else layer.held(tokens) for layer in cached_layers(self.config, batch, self.dtype)]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers would search this file for experts; they are in the family's module.
        return True

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Compute logits [B, T, vocab] of input_ids [B, T], only for the last `logits_to_keep` tokens if not 0."""
        if self._hooked_on is None and self.on_device is not None and self.device.type == "cuda" and not self.training:
            self._hooked_on = self.device
            type(self).on_device(self)
        # Users set these on this model's config; the decoder reads its own.
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        kwargs.setdefault("output_hidden_states", self.config.output_hidden_states)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=self.config.use_cache if use_cache is None else use_cache,
            return_dict=True,
            **{CACHE: cache},
            **kwargs,
        )
        slice_indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, slice_indices, :])
        if (factor := logit_factor(self.config)) != 1.0:
            logits = logits * factor
        if (cap := logit_cap(self.config)) is not None:
            logits = (logits / cap).tanh() * cap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: returned_cache(outputs)},
        )
