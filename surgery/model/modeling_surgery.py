"""A stock decoder with a converted attention in place of its own.

Everything around the attention (embeddings, norms, MLPs, experts) is the source family's own code.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from typing import ClassVar

import torch
from torch import nn
from transformers import MODEL_MAPPING, Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .attention_functions import family_attention_class
from .configuration_surgery import SurgeryConfig
from .latent_attention import LatentAttention

ATTENTION: dict[str, type[nn.Module]] = {"latent": LatentAttention}
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
        self.model = MODEL_MAPPING[type(base_config)](base_config)
        config._experts_implementation = base_config._experts_implementation
        for layer, entry in zip(self.model.layers, config.attention_layers, strict=True):
            if entry is not None:
                attention_class = family_attention_class(ATTENTION[entry["kind"]], type(layer.self_attn))
                layer.self_attn = attention_class(layer.self_attn, entry)
        # The family's tensor-parallel plan splits heads, which a shared latent cannot follow.
        self.model._tp_plan = {name: plan for name, plan in self.model._tp_plan.items() if ".self_attn." not in name}
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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


__all__ = ["SurgeryForCausalLM"]
