"""Adapted decoders of families with other module names, or whose attention gets no positions.

GPT-NeoX (arXiv:2204.06745) and GPT-2 have a fused QKV projection and other module names than most families. Here their
decoders have `embed_tokens`, `layers` and `norm`; layers have `input_layernorm` and `self_attn`; attention has
`q_proj`, `k_proj`, `v_proj` and `o_proj`. The computation is the family's own code. Layers of Granite 4 pass
`position_ids` to their attention.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from typing import ClassVar

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig

from .attention_functions import attend, family_attention_class
from .cache_argument import CACHE, takes_cache
from .rotary import NoRotation, project_heads, rotation_of


class SeparateAttention(nn.Module):
    """A family's attention with separate projections of queries, keys and values, and any number of KV heads."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        # Not super(): the class built by `family_attention_class` has the family's attention next in line.
        nn.Module.__init__(self)
        self.config, self.layer_idx = config, layer_idx
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.head_dim = hidden // heads
        self.num_key_value_groups = heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = getattr(config, "attention_dropout", getattr(config, "attn_pdrop", 0.0))
        self.is_causal = True
        bias, width = getattr(config, "attention_bias", True), config.num_key_value_heads * self.head_dim
        self.q_proj, self.o_proj = nn.Linear(hidden, hidden, bias), nn.Linear(hidden, hidden, bias)
        self.k_proj, self.v_proj = nn.Linear(hidden, width, bias), nn.Linear(hidden, width, bias)
        self.rotate = rotation_of(self)

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor | None, torch.Tensor | None],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the output [B, T, D] of hidden_states [B, T, D] and, if eager, weights [B, H, T, S]."""
        query, key, value = project_heads(self, hidden_states, position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, weights = attend(self, query, key, value, attention_mask, **kwargs)
        return self.o_proj(out.flatten(2)), weights


def _alias(name: str) -> property:
    """Make a property that aliases attribute `name`."""
    return property(lambda module: getattr(module, name))


class NeoXLayer(nn.Module):
    """Mixin that `family_attention_class` puts before GPT-NeoX's layer class."""

    names: ClassVar[dict[str, str]] = {"attention": "self_attn"}

    def attention(self, hidden_states: torch.Tensor, layer_past: Cache | None = None, **kwargs) -> tuple:
        """Run the attention; the family names the cache argument `layer_past`."""
        return self.self_attn(hidden_states, cache=layer_past, **kwargs)


class GPT2Layer(nn.Module):
    """Mixin of GPT-2's layer class."""

    names: ClassVar[dict[str, str]] = {
        "attn": "self_attn",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
    }
    ln_1, ln_2 = _alias("input_layernorm"), _alias("post_attention_layernorm")

    def attn(self, hidden_states: torch.Tensor, **kwargs) -> tuple:
        """Run the attention and its output dropout, which has the same rate as that of the MLP."""
        out, weights = self.self_attn(hidden_states, position_embeddings=(None, None), **kwargs)
        return self.mlp.dropout(out), weights


class FamilyDecoder(nn.Module):
    """Mixin that `family_attention_class` puts before a family's decoder class."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: the decoder is the family's own code."""
        return False

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers would search this file for its attention interface, which is in `attend`.
        return True


class RenamedDecoder(FamilyDecoder):
    """Decoder whose modules get the names that most families use."""

    names: ClassVar[dict[str, str]]
    layer_class: ClassVar[type[nn.Module]]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        _rename(self, self.names)
        for index, layer in enumerate(self.layers):
            layer.__class__ = family_attention_class(self.layer_class, type(layer))
            _rename(layer, self.layer_class.names)
            attention = SeparateAttention
            if getattr(config, "rope_parameters", None) is not None:  # `rotation_of` finds the family by class
                attention = family_attention_class(SeparateAttention, type(layer.self_attn))
            layer.self_attn = attention(config, index)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings."""
        self.embed_tokens = value


class NeoXDecoder(RenamedDecoder):
    """Decoder of GPT-NeoX."""

    names: ClassVar[dict[str, str]] = {"embed_in": "embed_tokens", "final_layer_norm": "norm"}
    layer_class = NeoXLayer
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": NeoXLayer, "attentions": SeparateAttention}
    embed_in, final_layer_norm = _alias("embed_tokens"), _alias("norm")


class GPT2Decoder(RenamedDecoder):
    """Decoder of GPT-2, with learned positions that are added to the embeddings."""

    names: ClassVar[dict[str, str]] = {
        "wte": "embed_tokens",
        "wpe": "embed_positions",
        "h": "layers",
        "ln_f": "norm",
    }
    layer_class = GPT2Layer
    _can_record_outputs: ClassVar[dict[str, type]] = {"hidden_states": GPT2Layer, "attentions": SeparateAttention}
    wte, wpe, h, ln_f = (_alias(name) for name in ("embed_tokens", "embed_positions", "layers", "norm"))

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.rotary_emb = NoRotation()


DECODERS: dict[str, type[RenamedDecoder]] = {"gpt_neox": NeoXDecoder, "gpt2": GPT2Decoder}
"""Decoders of families with other module names, by `model_type`."""


class PlacedLayer(nn.Module):
    """Mixin of a layer class that passes positions to its attention; see `family_attention_class`."""

    def forward(self, hidden_states: torch.Tensor, token_positions: torch.Tensor | None = None, **kwargs):
        """Run the family's layer; layers with a recurrent state get no positions."""
        if getattr(self, "self_attn", None) is not None:
            kwargs["position_ids"] = token_positions
        return super().forward(hidden_states, **kwargs)


class PlacedDecoder(FamilyDecoder):
    """Decoder that passes positions to its layers, which the family's own does not."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        for layer in self.layers:
            layer.__class__ = family_attention_class(PlacedLayer, type(layer))

    @takes_cache
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        *,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ):
        """Run the family's decoder."""
        if position_ids is None:
            inputs = input_ids if input_ids is not None else kwargs["inputs_embeds"]
            past_length = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(inputs.shape[1], device=inputs.device)[None] + past_length
        kwargs |= {"position_ids": position_ids, "token_positions": position_ids, CACHE: cache}
        return super().forward(input_ids=input_ids, **kwargs)


def _rename(module: nn.Module, names: dict[str, str]) -> None:
    """Rename child modules; properties of the class keep their old names working."""
    for old, new in names.items():
        module._modules[new] = module._modules.pop(old)


def decoder_class(family: str) -> type[FamilyDecoder]:
    """Return the mixin of a family's decoder class, by `model_type`."""
    return DECODERS.get(family, PlacedDecoder)
