"""Multi-head latent attention (MLA) with any ranks and frequencies, as a replacement of a family's own attention.

The absorbed form of DeepSeek-V2 (arXiv:2405.04434, eq. 37-47): the up-projections of keys and values are applied to the
query and the output instead, so that attention reads the cached latent itself. Keys and values are never expanded.

Shapes: B batch, T new tokens, S tokens in the cache, H query heads, G KV heads of the source, d head_dim, D hidden
size, r kv_lora_rank, ρ width of the shared RoPE key.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers import initialization as init

from .attention_functions import (
    Accelerated,
    attend,
    begin_as,
    cache_positions,
    gated,
    project_queries,
    rotate_pairs,
    scaled_by_position,
    take,
)
from .cache_argument import takes_cache
from .latent_entry import LatentEntry


class LatentRotaryEmbedding(nn.Module):
    """Rotary embedding of one layer's shared key, with an arbitrary list of ρ/2 inverse frequencies.

    Attributes:
        axes: position axis of each pair, for families with several axes (see `axis_decoder`); else None.
    """

    axes: list[int] | None = None

    def __init__(self, frequencies: Sequence[float]):
        super().__init__()
        self.frequencies = tuple(frequencies)
        self.register_buffer("inv_freq", self._as_tensor(), persistent=False)

    def _as_tensor(self, device: torch.device | None = None) -> torch.Tensor:
        return torch.tensor(self.frequencies, dtype=torch.float32, device=device)

    def _apply(self, fn, recurse=True):
        # `model.to(bfloat16)` would round the frequencies, an error that grows with position: follow only the device.
        super()._apply(fn, recurse)
        self.inv_freq = self._as_tensor(self.inv_freq.device)
        return self

    def initialize_weights(self) -> None:
        """Refill the non-persistent buffer after loading from the meta device."""
        init.copy_(self.inv_freq, self._as_tensor(self.inv_freq.device))

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute cos and sin [B, 1, T, ρ/2] in fp32 of position_ids [B, T], or [A, B, T] with A axes."""
        if position_ids.ndim == 3 and self.axes is None:
            raise ValueError("position_ids with several axes: rope_inv_freq must hold the family's own frequencies")
        positions = position_ids[..., None]
        if position_ids.ndim == 3:
            positions = take(position_ids, self.axes, 0).permute(1, 2, 0)
        angles = positions[:, None].float() * self.inv_freq
        return angles.cos(), angles.sin()


class LatentAttention(Accelerated, nn.Module):
    r"""Absorbed multi-head latent attention, a replacement of a family's stock attention module.

    Per head h, with c = kv_down(x) and R_m the rotation of position m:

        latent_n, k_rope_n = c_n[:r], R_n c_n[r:]                                     (cached)
        q_latent_h(m)      = q_h(m) @ query_up_h, its last ρ entries rotated by R_m
        score_h(m, n)      = scaling · ⟨q_latent_h(m), [latent_n ; k_rope_n]⟩ · key_irms_{g(h)}(n)
        out_h(m)           = value_up_h @ Σ_n softmax(score_h(m, ·))_n latent_n

    `key_irms` [B, T, G], the inverse rms of the source's keys, is used only with an exact key norm (`key_norm_eps`):
    the rms depends on the token, so no fixed matrix can absorb it, and its inverse is cached with the latent. The
    norm's weight acts before the rotation: the converter has folded it into the key rows of `kv_down`.
    """

    def __init__(self, stock: nn.Module, entry: LatentEntry):
        begin_as(self, stock)
        config = stock.config
        self.kv_lora_rank, self.rope_dim = entry.kv_lora_rank, entry.rope_dim
        self.key_norm_eps = entry.key_norm_eps
        self.sliding_window = getattr(stock, "sliding_window", getattr(config, "sliding_window", None)) or None
        self.ranks = entry.ranks

        self.q_proj = stock.q_proj
        self.o_proj = stock.o_proj
        if hasattr(stock, "sinks"):
            self.sinks = stock.sinks
        self.q_norm = getattr(stock, "q_norm", None)
        if self.key_norm_eps is not None:
            if not hasattr(stock, "k_norm"):
                raise ValueError(f"layer {self.layer_idx}: key_norm_eps is set, but {config.model_type} has no k_norm")
            self.k_proj = stock.k_proj
        self.key_gains = entry.key_gains(config)
        # One latent for all heads, or one scaled copy per group of heads with the same rms.
        self.num_key_value_groups = self.num_heads // max(1, self.key_gains)

        bias = any(projection.bias is not None for projection in (stock.k_proj, stock.v_proj))
        latent_width = self.kv_lora_rank + self.rope_dim
        self.kv_down = nn.Linear(config.hidden_size, latent_width, bias=bias)
        self.query_up = nn.Parameter(torch.empty(self.num_heads, self.head_dim, latent_width))
        self.value_up = nn.Parameter(torch.empty(self.num_heads, self.head_dim, entry.value_width))
        self.rotary = LatentRotaryEmbedding(entry.rope_inv_freq)

    def initialize_weights(self) -> None:
        """Initialize tensors that the base model does not have; loaded tensors stay unchanged."""
        init.normal_(self.query_up, std=self.config.initializer_range)
        init.normal_(self.value_up, std=self.config.initializer_range)
        self.rotary.initialize_weights()

    def connect(self, decoder: nn.Module, shared_latents: dict[int, torch.Tensor]) -> None:
        """Look up the position axis of each pair if the decoder has several axes (see `axis_decoder`)."""
        if hasattr(decoder, "axes_of"):
            self.rotary.axes = decoder.axes_of(self.rotary.frequencies)

    @property
    def latent_slices(self) -> list[slice]:
        """Slices of `kv_down`'s outputs that hold latents, truncatable to any length; see `LowRankAttention`."""
        return [slice(0, rank) for rank in self.ranks]

    def latent_readers(self) -> list[list[torch.Tensor]]:
        """Return, for each of `latent_slices`, views [·, r] of all weights that read these latents."""
        weights = [self.query_up[..., : self.kv_lora_rank].flatten(0, 1), self.value_up.flatten(0, 1)]
        return [weights] if self.latent_slices else []

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        left_padding: Any = None,
        axis_positions: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the output [B, T, D] of hidden_states [B, T, D] and, if eager, weights [B, H, T, S].

        `position_embeddings`, the family's cos and sin for a whole head, are unused: latents have other frequencies.
        Without `position_ids` [B, T], which Llama 4 does not pass down, positions are those in the cache.
        `axis_positions` as in `AxisDecoder`. `left_padding` is read by `StreamingLatentAttention` without a cache.
        """
        batch, num_tokens, _ = hidden_states.shape
        if position_ids is None:
            position_ids = cache_positions(self, hidden_states, cache)
        cos, sin = self.rotary(position_ids if axis_positions is None else axis_positions[..., -num_tokens:])
        query, gate = project_queries(self, hidden_states)
        query = scaled_by_position(self, self._latent_query(query, cos, sin), position_ids)
        latent, k_rope = self.kv_down(hidden_states).unsqueeze(1).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        positional = rotate_pairs(k_rope, cos, sin)
        if self.key_norm_eps is not None:
            positional = torch.cat((positional, self._key_irms(hidden_states)), dim=-1)
        kwargs |= {"sliding_window": self.sliding_window, "position_ids": position_ids}
        # Expanding keys and values to d elements per head would save operations in a long prompt, since r + ρ > d.
        # One path for prefill and decoding keeps their results equal and the memory small.
        out, weights = self._attend(query, latent, positional, attention_mask, cache, left_padding, **kwargs)
        out = gated(torch.einsum("bthr,hvr->bthv", out, self.value_up), gate)
        return self.o_proj(out.reshape(batch, num_tokens, -1)), weights

    def _attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        positional: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        left_padding: Any,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cache the latents and positional parts of new tokens; return outputs [B, T, H, r] and, if eager, weights."""
        if self.kernel is not None:
            out = self.kernel(self, query, latent, positional, attention_mask, cache)
            if out is not None:
                return out, None
        if cache is not None:
            latent, positional = cache.update(latent, positional, self.layer_idx)
        return attend(self, query, *self._latent_key_value(latent, positional), attention_mask, **kwargs)

    def _latent_query(self, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Map queries [B, T, H, d] to the space of latent keys [B, H, T, r + ρ], and rotate their last ρ elements."""
        query = torch.einsum("bthd,hdk->bhtk", query, self.query_up)
        content, rope = query.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        return torch.cat((content, rotate_pairs(rope, cos, sin)), dim=-1)

    def _key_irms(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the inverse rms of the source's keys before their norm: [B, T, D] → [B, 1, T, G or 1]."""
        key = self.k_proj(hidden_states).unflatten(-1, (self.key_gains, -1))
        key = key.to(torch.promote_types(key.dtype, torch.float32))
        irms = torch.rsqrt(key.square().mean(dim=-1) + self.key_norm_eps)
        return irms.to(hidden_states.dtype).unsqueeze(1)

    def _latent_key_value(self, latent: torch.Tensor, positional: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Build key [B, K, S, r + ρ] and value [B, K, S, r] from latent [B, 1, S, r] and positional part [B, 1, S, ·].

        K is 1, or G with an exact key norm, whose scaled copies are freed after the call. The two parts are cached
        apart, as in transformers' `deepseek_v3`, and joined here because the attention interface takes one key.
        """
        if self.key_norm_eps is None:
            return torch.cat((latent, positional), dim=-1), latent
        k_rope, key_irms = positional.split((self.rope_dim, self.key_gains), dim=-1)
        key = torch.cat((latent, k_rope), dim=-1) * key_irms.permute(0, 3, 2, 1)  # [B, 1, S, ·] · [B, G, S, 1]
        return key, latent.expand(-1, self.key_gains, -1, -1)
