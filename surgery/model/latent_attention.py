"""Multi-head latent attention (MLA) with any ranks and frequencies, in the place of a family's own attention.

The attention is that of DeepSeek-V2 (arXiv:2405.04434, eq. 37-47) in its absorbed form: the up-projections of keys and
values are moved to the query and the output, so that attention reads the cached latent itself and keys and values are
never expanded.

Shapes: B batch, T new tokens, S tokens in the cache, H query heads, G KV heads of the source, d head_dim, D hidden
size, r kv_lora_rank, ρ width of the shared RoPE key.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
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
    gated,
    places_in_cache,
    project_queries,
    rotate_pairs,
    scaled_by_position,
    take,
)
from .cache_argument import takes_cache
from .latent_entry import LatentEntry


class LatentRotaryEmbedding(nn.Module):
    """The rotation of one layer's shared key: an arbitrary list of ρ/2 inverse frequencies.

    Attributes:
        axes: of each pair, by which of a token's positions it turns, where a family has several (see `axis_decoder`).
    """

    axes: list[int] | None = None

    def __init__(self, frequencies: Sequence[float]):
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
        """position_ids [B, T], or of all axes [A, B, T] → cos, sin [B, 1, T, ρ/2] in fp32."""
        if position_ids.ndim == 3 and self.axes is None:
            raise ValueError("positions of several axes: some rope_inv_freq are no frequencies of the family")
        of_pairs = position_ids[..., None]
        if position_ids.ndim == 3:
            of_pairs = take(position_ids, self.axes, 0).permute(1, 2, 0)
        angles = of_pairs[:, None].float() * self.inv_freq
        return angles.cos(), angles.sin()


class LatentAttention(Accelerated, nn.Module):
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

    def __init__(self, stock: nn.Module, entry: LatentEntry):
        begin_as(self, stock)
        config = stock.config
        self.kv_lora_rank, self.rope_dim = entry.kv_lora_rank, entry.rope_dim
        self.key_norm_eps = entry.key_norm_eps
        self.sliding_window = getattr(stock, "sliding_window", getattr(config, "sliding_window", None))
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
        # One latent for all heads, or one scaled copy of it for each group of heads that shares a norm.
        self.num_key_value_groups = self.num_heads // max(1, self.key_gains)

        bias = any(projection.bias is not None for projection in (stock.k_proj, stock.v_proj))
        latent_width = self.kv_lora_rank + self.rope_dim
        self.kv_down = nn.Linear(config.hidden_size, latent_width, bias=bias)
        self.query_up = nn.Parameter(torch.empty(self.num_heads, self.head_dim, latent_width))
        self.value_up = nn.Parameter(torch.empty(self.num_heads, self.head_dim, self.kv_lora_rank))
        self.rotary = LatentRotaryEmbedding(entry.rope_inv_freq)

    def initialize_weights(self) -> None:
        """Fill what the base model's own initialization does not know; loaded tensors are left alone."""
        init.normal_(self.query_up, std=self.config.initializer_range)
        init.normal_(self.value_up, std=self.config.initializer_range)
        self.rotary.initialize_weights()

    def connect(self, decoder: nn.Module, shared_latents: dict[int, torch.Tensor]) -> None:
        """Learn by which of a token's positions pairs turn, of a decoder that has several (see `axis_decoder`)."""
        if hasattr(decoder, "axes_of"):
            self.rotary.axes = decoder.axes_of(self.rotary.frequencies)

    @property
    def latent_slices(self) -> list[slice]:
        """Slices of `kv_down`'s outputs that are latents and may be cut after any of them, see `LowRankAttention`."""
        return [slice(0, rank) for rank in self.ranks]

    def latent_readers(self) -> list[list[torch.Tensor]]:
        """Return, for each of `latent_slices`, views [·, r] of all weights that read its latents."""
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
        """hidden_states [B, T, D], position_ids [B, T] → output [B, T, D] and, if eager, weights [B, H, T, S].

        `position_embeddings` are the base family's cos and sin for a whole head; the latent has its own frequencies.
        Families that hand on no `position_ids` (Llama 4) count places in the cache. `axis_positions` as in
        `AxisDecoder`.
        `left_padding` of each row is read where a layer streams and there is no cache that knows it, see
        `StreamingLatentAttention`.
        """
        batch, num_tokens, _ = hidden_states.shape
        if position_ids is None:
            position_ids = places_in_cache(self, hidden_states, cache)
        cos, sin = self.rotary(position_ids if axis_positions is None else axis_positions[..., -num_tokens:])
        query, gate = project_queries(self, hidden_states)
        query = scaled_by_position(self, self._latent_query(query, cos, sin), position_ids)
        latent, k_rope = self.kv_down(hidden_states).unsqueeze(1).split((self.kv_lora_rank, self.rope_dim), dim=-1)
        positional = rotate_pairs(k_rope, cos, sin)
        if self.key_norm_eps is not None:
            positional = torch.cat((positional, self._key_irms(hidden_states)), dim=-1)
        kwargs |= {"sliding_window": self.sliding_window, "position_ids": position_ids}
        # A long prompt would cost fewer operations with keys and values expanded to d numbers a head, since
        # r + ρ > d. One path for prompts and steps keeps their results equal and the memory small.
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
        """Outputs [B, T, H, r] and, if eager, weights, of queries and of the new tokens' latent and positional part."""
        if self.kernel is not None:
            out = self.kernel(self, query, latent, positional, attention_mask, cache)
            if out is not None:
                return out, None
        if cache is not None:
            latent, positional = cache.update(latent, positional, self.layer_idx)
        return attend(self, query, *self._latent_key_value(latent, positional), attention_mask, **kwargs)

    def _latent_query(self, query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Heads [B, T, H, d] → in the space of the latent key [B, H, T, r + ρ]."""
        query = torch.einsum("bthd,hdk->bhtk", query, self.query_up)
        content, rope = query.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        return torch.cat((content, rotate_pairs(rope, cos, sin)), dim=-1)

    def _key_irms(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Inverse rms of the source's keys before their norm: [B, T, D] → [B, 1, T, G], or one for all heads."""
        key = self.k_proj(hidden_states).unflatten(-1, (self.key_gains, -1))
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
        k_rope, key_irms = positional.split((self.rope_dim, self.key_gains), dim=-1)
        key = torch.cat((latent, k_rope), dim=-1) * key_irms.permute(0, 3, 2, 1)  # [B, 1, S, ·] · [B, G, S, 1]
        return key, latent.expand(-1, self.key_gains, -1, -1)
