"""A stock decoder with a converted attention in place of its own.

Everything around the attention (embeddings, norms, MLPs, experts) is the source family's own code.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import MODEL_MAPPING, Cache, GenerationMixin, PreTrainedModel, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .attention_functions import family_attention_class
from .cache_argument import CACHE, returned_cache, takes_cache
from .cache_layer import CacheLayer, CompactLayer, check_full_attention
from .cache_prediction import footprint, peak_bytes
from .configuration_surgery import SurgeryConfig
from .converted_decoder import ConvertedModel, cache_layers, cached_layers, convert_decoder, family_decoder_class
from .logit_factor import logit_cap, logit_factor
from .parts import entries_of, part


class SurgeryForCausalLM(ConvertedModel, PreTrainedModel, GenerationMixin):
    """The source family's causal language model with a converted attention in the layers that `attention_layers` names.

    Tensors keep the source's names; those of an attention that was converted are listed in its class.
    """

    config_class = SurgeryConfig
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    entry_class: ClassVar[Callable[[SurgeryConfig], type[PreTrainedModel]] | None] = None
    """Gives the subclass of an entry module that an instance gets; the package `surgery` puts it here. Next to weights
    there is one entry module alone."""
    on_device: ClassVar[Callable[[PreTrainedModel], Any] | None] = None
    """Called with a model once, before its first decoding on CUDA; the package `surgery`, where it is imported, puts
    its kernels under the model here."""
    # MTP layers, which Qwen's checkpoints hold next to the model.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^mtp\."]

    def __new__(cls, config: SurgeryConfig | None = None, *args, **kwargs):
        """Make an instance of the class whose module `save_pretrained` writes; copies are made without a config."""
        has_choice = cls is SurgeryForCausalLM and cls.entry_class is not None and config is not None
        return super().__new__(cls.entry_class(config) if has_choice else cls)

    def __init__(self, config: SurgeryConfig):
        if config.attention_layers is None:
            raise ValueError("the configuration has no attention_layers: it describes no converted model")
        # Before super() fills in defaults: whether there are experts to run, only the base model knows.
        base_config = config.base_config()
        self._take_attention(config, MODEL_MAPPING[type(base_config)])
        super().__init__(config)
        base_config._attn_implementation = config._attn_implementation
        # A PreTrainedModel of its own, under its own model_type, so that transformers' conversion of per-expert
        # checkpoint tensors still applies to it.
        decoder_class = family_decoder_class(config.base_model_type, MODEL_MAPPING[type(base_config)])
        self.is_blockwise = any(entry.shares_cache for entry in entries_of(config))
        if self.is_blockwise:
            check_full_attention(config, "a cache that layers share")
            decoder_class = family_attention_class(part("blockwise_decoder").BlockwiseDecoder, decoder_class)
        self.model = decoder_class(base_config)
        self._is_stateful = self.model._is_stateful
        config._experts_implementation = base_config._experts_implementation
        convert_decoder(self.model, config)
        self._met_device: torch.device | None = None
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def cache_layers(self) -> list[CacheLayer] | None:
        """New, empty layers of the cache that this model keeps; None where those of a plain `DynamicCache` do."""
        return cache_layers(self.config)

    def reserved_cache(self, tokens: int) -> Cache:
        """An empty cache with memory for that many tokens of each row, which stays where it is until they have come.

        Of plain tensors a `StaticCache`, which takes no more; caches of every other form grow beyond `tokens`.
        """
        layers = self.model.cache_layers() if self.is_blockwise else self.cache_layers()
        if layers is None:
            return StaticCache(config=self.config, max_cache_len=tokens)
        for layer in layers:
            if isinstance(layer, CompactLayer):  # windows grow no further than they are wide
                layer.reserve(tokens)
        return Cache(layers=layers)

    def kv_cache_bytes(self, batch: int, tokens: int, prompt: int | None = None) -> int:
        """Bytes that the live cache will hold after `tokens` tokens of each of `batch` rows, in the model's dtype.

        Of layers with linear attention nothing is counted: their states do not grow with the tokens. `prompt` is the
        length of the first pass, by default all; only a basis of the prompt's own depends on it.
        """
        if self.is_blockwise:
            return part("blockwise_decoder").kv_cache_bytes(self.config, batch, tokens, self.dtype, prompt)
        return sum(self.kv_layer_bytes(batch, tokens))

    def kv_layer_bytes(self, batch: int, tokens: int) -> list[int]:
        """Return the bytes of every layer by itself; layers that share a cache have none of their own."""
        return [0 if layer is None else layer.held(tokens) for layer in cached_layers(self.config, batch, self.dtype)]

    def kv_peak_bytes(self, batch: int, prompt: int, chunk: int, steps: int) -> int:
        """The most bytes that keys and values will take while a prompt is read and continued, in the model's dtype.

        Looked at after every call of a cache layer's `update` (of a hybrid layer's parts: `full.update`, and then
        `streaming.update` for each piece): what the whole cache holds at that moment, and of the tensors that this call
        returned those that share no storage with it, such as dequantized tokens, or the window and the new tokens that
        attention reads together. The means of dropped tokens that attention takes of a compensated layer next are in
        its hands then, and count. Left out are the new tokens before they are cached, and what attention makes of what
        it was given, such as keys and values rebuilt from latents.

        Args:
            batch: rows, without padding.
            prompt: tokens of each, prefilled `chunk` at a time.
            steps: tokens decoded after it, one by one.

        Raises:
            ValueError: layers that share a cache or keep a state, whose peak can only be measured, or sizes below 1,
                `steps` below 0.
        """
        if min(batch, prompt, chunk) < 1 or steps < 0:
            raise ValueError(f"{batch} x {prompt} tokens in chunks of {chunk} and {steps} steps are no generation")
        if self.is_blockwise:
            raise ValueError("the peak of a cache that layers share cannot be predicted: measure it")
        if None in (layers := cached_layers(self.config, batch, self.dtype)):
            raise ValueError("the peak of a cache beside states cannot be predicted: measure it")
        return peak_bytes(layers, prompt, chunk, steps)

    def kv_footprint(self, prompt: int, steps: int) -> float:
        """Share of full causal attention that this model computes, over a prompt and `steps` decoded tokens.

        Counted are pairs of a query of one head and a key that it sees, a compensation token for one key, in rows
        without padding; whatever chunks the prompt comes in. A token that a layer holds twice counts once.
        """
        heads, layers = self.config.num_attention_heads, cached_layers(self.config, 1, self.dtype)
        windows = [
            entry.windows(self.config) or [(heads, getattr(cached.layer, "sliding_window", None), False)]
            for cached, entry in zip(layers, entries_of(self.config), strict=True)
            if cached is not None
        ]
        return footprint(prompt + steps, heads, windows)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers would search this file for experts; those of a mixture are in the base family's.
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
        """input_ids [B, T] → logits [B, T, vocab], of the last `logits_to_keep` tokens if that is not 0."""
        if self._met_device is None and self.on_device is not None and self.device.type == "cuda" and not self.training:
            self._met_device = self.device
            type(self).on_device(self)
        # The base model looks these up in its own config, and users set them on this one.
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


__all__ = ["SurgeryForCausalLM"]
