"""A stock decoder with multi-head latent attention (MLA) in place of its own attention.

The attention is that of DeepSeek-V2 (arXiv:2405.04434, eq. 37-47) in its absorbed form: the up-projections of keys and
values are moved to the query and the output, so that attention reads the cached latent itself and keys and values are
never expanded. Everything around it (embeddings, norms, MLPs, experts) is the source family's own code.

Shapes: B batch, T new tokens, S tokens in the cache, H query heads, G KV heads of the source, d head_dim, D hidden
size, r kv_lora_rank, ρ width of the shared RoPE key.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbour, nothing else.
"""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import MODEL_MAPPING, Cache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from .configuration_surgery import SurgeryConfig


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention, `softmax(scaling · q kᵀ + mask) v`, with K ≤ H key-value heads.

    query [B, H, T, e], key [B, K, S, e], value [B, K, S, v], additive mask [B, 1, T, S]
    → out [B, T, H, v], weights [B, H, T, S].
    """
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    # The heads that share a key are stacked as rows of one matrix, so that no key is repeated in memory.
    query = query.reshape(batch, num_kv_heads, -1, query.shape[-1])
    scores = (query @ key.transpose(-1, -2) * scaling).view(batch, num_heads, num_queries, -1)
    if attention_mask is not None:
        scores = scores + attention_mask
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=softmax_dtype).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    out = weights.view(batch, num_kv_heads, -1, weights.shape[-1]) @ value
    return out.view(batch, num_heads, num_queries, -1).transpose(1, 2).contiguous(), weights


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Multiply x_{2i} + j·x_{2i+1} by e^{jθ_i m}: x [B, h, T, ρ], cos and sin [B, 1, T, ρ/2] in fp32."""
    real, imag = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


class LatentRotaryEmbedding(nn.Module):
    """The rotation of one layer's shared key: an arbitrary list of ρ/2 inverse frequencies."""

    def __init__(self, frequencies: list[float]):
        super().__init__()
        self.frequencies = tuple(frequencies)
        self.register_buffer("inv_freq", self._as_tensor(), persistent=False)

    def _as_tensor(self, device: torch.device | None = None) -> torch.Tensor:
        return torch.tensor(self.frequencies, dtype=torch.float32, device=device)

    def _apply(self, fn, recurse=True):
        # `model.to(bfloat16)` would round the frequencies, which long positions amplify: follow only the device.
        super()._apply(fn, recurse)
        self.inv_freq = self._as_tensor(self.inv_freq.device)
        return self

    def initialize_weights(self) -> None:
        """Refill the buffer, which is on no checkpoint, after it came off the meta device."""
        init.copy_(self.inv_freq, self._as_tensor(self.inv_freq.device))

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [B, T] → cos, sin [B, 1, T, ρ/2] in fp32."""
        angles = position_ids[:, None, :, None].float() * self.inv_freq
        return angles.cos(), angles.sin()


class LatentAttention(nn.Module):
    r"""Absorbed multi-head latent attention, fitted into the place of a family's stock attention module.

    Per head h, with c = kv_down(x) and R_m the rotation of position m:

        latent_n, k_rope_n = c_n[:r], R_n c_n[r:]                                     (cached)
        q_latent_h(m)      = q_h(m) @ query_up_h, its last ρ entries rotated by R_m
        score_h(m, n)      = scaling · ⟨q_latent_h(m), [latent_n ; k_rope_n]⟩ · key_irms_{g(h)}(n)
        out_h(m)           = value_up_h @ Σ_n softmax(score_h(m, ·))_n latent_n

    The inverse rms of the source's keys, `key_irms` [B, T, G], is there only on the exact q/k-norm path: the norm
    divides each key by a number that no fixed matrix can absorb, so that number is cached with the latent. The norm's
    weight acts before the rotation: the converter has folded it into the key rows of `kv_down`.
    """

    def __init__(self, stock: nn.Module, latent: dict[str, Any], latent_bias: bool = False):
        # Not super(): the class built by `latent_attention_class` has the family's attention next in line.
        nn.Module.__init__(self)
        config = stock.config
        self.config = config
        self.layer_idx = stock.layer_idx
        self.head_dim = stock.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.kv_lora_rank = latent["kv_lora_rank"]
        self.rope_dim = 2 * len(latent["rope_inv_freq"])
        self.key_norm_eps = latent["key_norm_eps"]
        self.scaling = stock.scaling
        self.attention_dropout = stock.attention_dropout
        self.sliding_window = getattr(stock, "sliding_window", getattr(config, "sliding_window", None))
        self.is_causal = True

        self.q_proj = stock.q_proj
        self.o_proj = stock.o_proj
        self.q_norm = getattr(stock, "q_norm", None)
        if self.key_norm_eps is not None:
            if not hasattr(stock, "k_norm"):
                raise ValueError(f"layer {self.layer_idx}: key_norm_eps is set, but {config.model_type} has no k_norm")
            self.k_proj = stock.k_proj
        # One latent for all heads, or one scaled copy of it for each group of heads that shares a norm.
        self.num_key_value_groups = self.num_heads // (1 if self.key_norm_eps is None else self.num_kv_heads)

        bias = latent_bias or any(projection.bias is not None for projection in (stock.k_proj, stock.v_proj))
        latent_width = self.kv_lora_rank + self.rope_dim
        self.kv_down = nn.Linear(config.hidden_size, latent_width, bias=bias)
        self.query_up = nn.Parameter(torch.empty(self.num_heads, self.head_dim, latent_width))
        self.value_up = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.kv_lora_rank))
        self.rotary = LatentRotaryEmbedding(latent["rope_inv_freq"])

    def __reduce__(self):
        family = type(self).__bases__[-1]
        return _unpickled, (family,), self.__dict__

    def initialize_weights(self) -> None:
        """Fill what the base model's own initialisation does not know; loaded tensors are left alone."""
        init.normal_(self.query_up, std=self.config.initializer_range)
        init.normal_(self.value_up, std=self.config.initializer_range)
        self.rotary.initialize_weights()

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [B, T, D], position_ids [B, T] → output [B, T, D] and, if eager, weights [B, H, T, S].

        `position_embeddings` are the base family's cos and sin for a whole head; the latent has its own frequencies.
        """
        batch, num_tokens, _ = hidden_states.shape
        cos, sin = self.rotary(position_ids)
        query = self._latent_query(hidden_states, cos, sin)
        latent, k_rope = self.kv_down(hidden_states).unsqueeze(1).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        positional = rotate_pairs(k_rope, cos, sin)
        if self.key_norm_eps is not None:
            positional = torch.cat((positional, self._key_irms(hidden_states)), dim=-1)
        if past_key_values is not None:
            latent, positional = past_key_values.update(latent, positional, self.layer_idx)
        key, value = self._latent_key_value(latent, positional)

        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        # A long prompt would cost fewer operations with keys and values expanded to d numbers a head, since
        # r + ρ > d. One path for prompts and steps keeps their results equal and the memory small; fused kernels
        # for both live elsewhere.
        out, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            position_ids=position_ids,
            **kwargs,
        )  # [B, T, H, r]
        out = torch.einsum("bthr,hvr->bthv", out, self.value_up)
        return self.o_proj(out.reshape(batch, num_tokens, -1)), weights

    def _latent_query(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Project to heads, then into the space of the latent key: [B, T, D] → [B, H, T, r + ρ]."""
        query = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        if self.q_norm is not None:
            query = self.q_norm(query)
        query = torch.einsum("bthd,hdk->bhtk", query, self.query_up)
        content, rope = query.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        return torch.cat((content, rotate_pairs(rope, cos, sin)), dim=-1)

    def _key_irms(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Inverse rms of the source's keys before their norm: [B, T, D] → [B, 1, T, G]."""
        key = self.k_proj(hidden_states).unflatten(-1, (self.num_kv_heads, self.head_dim))
        key = key.to(torch.promote_types(key.dtype, torch.float32))
        irms = torch.rsqrt(key.square().mean(dim=-1) + self.key_norm_eps)
        return irms.to(hidden_states.dtype).unsqueeze(1)

    def _latent_key_value(self, latent: torch.Tensor, positional: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached latent [B, 1, S, r] and positional part [B, 1, S, ρ (+ G)] → key [B, K, S, r + ρ], value [B, K, S, r].

        K is 1, or G with q/k-norm, where the scaled copies live only for the length of this call. The two parts are
        cached apart, as in transformers' `deepseek_v3`, and joined here because the attention interface takes one key.
        """
        if self.key_norm_eps is None:
            return torch.cat((latent, positional), dim=-1), latent
        k_rope, key_irms = positional.split((self.rope_dim, self.num_kv_heads), dim=-1)
        key = torch.cat((latent, k_rope), dim=-1) * key_irms.permute(0, 3, 2, 1)  # [B, 1, S, ·] · [B, G, S, 1]
        return key, latent.expand(-1, self.num_kv_heads, -1, -1)


@cache
def latent_attention_class(family: type[nn.Module]) -> type[LatentAttention]:
    """`LatentAttention` that is also the family's attention class, by which transformers finds `output_attentions`."""
    return type(LatentAttention.__name__, (LatentAttention, family), {"__module__": __name__})


def _unpickled(family: type[nn.Module]) -> LatentAttention:
    """An empty instance of a class that pickle cannot find by name."""
    cls = latent_attention_class(family)
    return cls.__new__(cls)


class SurgeryForCausalLM(PreTrainedModel, GenerationMixin):
    """The source family's causal language model with `LatentAttention` in the layers that `latent_layers` describes.

    Tensors keep the source's names; in `model.layers.N.self_attn`, `kv_down`, `query_up` and `value_up` replace
    `k_proj` (kept on the exact q/k-norm path), `v_proj` and `k_norm`.
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
        if config.latent_layers is None:
            raise ValueError("the configuration has no latent_layers: it describes no converted model")
        # Before super() fills in defaults: whether there are experts to run, only the base model knows.
        base_config = config.base_config()
        super().__init__(config)
        base_config._attn_implementation = config._attn_implementation
        # A PreTrainedModel of its own, under its own model_type, so that transformers' conversion of per-expert
        # checkpoint tensors still applies to it.
        self.model = MODEL_MAPPING[type(base_config)](base_config)
        config._experts_implementation = base_config._experts_implementation
        for layer, latent in zip(self.model.layers, config.latent_layers, strict=True):
            if latent is not None:
                attention_class = latent_attention_class(type(layer.self_attn))
                layer.self_attn = attention_class(layer.self_attn, latent, config.latent_bias)
        # The family's tensor-parallel plan splits heads, which the shared latent and the 3-d parameters cannot follow.
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
        # transformers hands the inside of `self.model` to the base family's `_init_weights`, which knows no latents.
        for module in self.modules():
            if isinstance(module, LatentAttention):
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
