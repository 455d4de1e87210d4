"""Multi-head latent attention over a cache of packed rows: quantized latents and shared keys.

The shared key is quantized before its rotation, while its channels have stable ranges, and rotated when it is read; it
is small and shared by all heads. Decoding uses the absorbed form of `LatentAttention`; prefill expands keys and values
to heads (`expanded_heads`).

Shapes: B batch, T new tokens, S tokens in the cache, r kv_lora_rank, ρ width of the shared key, G KV heads.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from transformers import Cache

from .attention_functions import attend, gated, own_softmax, project_queries, rotate_pairs, scaled_by_position
from .blockwise_rows import BLOCK, MOST_QUERIES, BlockwiseRows
from .cache_argument import takes_cache
from .expanded_heads import attend_expanded
from .head_pairs import HeadPairs
from .latent_attention import LatentAttention
from .left_padding import LeftPadding, layer_of
from .quantized_latent_entry import QuantizedLatentEntry
from .token_cache import TokenCacheLayer
from .token_quantizer import TokenQuantizer, gains_in, with_gains, with_gradient


class QuantizedLatentAttention(LatentAttention):
    r"""MLA whose cache holds one row per token: latent, shared key, and the gains of a key norm.

    With c = kv_down(x), Q the quantizer of a channel and n the index of a token in the cache:

        latent_n, k_rope_n = Q(c_n)[:r], R_n Q(c_n)[r:]      c_n itself for the first tokens of a text

    and scores and outputs as in `LatentAttention`. Positions are indices in the cache: RoPE depends on distances alone.
    With multi-axis RoPE, `axis_positions` holds the positions of all tokens. Training reads quantized values too, with
    straight-through gradients.

    If the entry `predicts_values`, outputs read the shared key before its rotation too: they sum Q(c_n) instead of
    latent_n, and `value_up` is [H, d, r + ρ]. The latent then holds only what the quantized key does not tell.
    """

    @classmethod
    def cache_layer_of(cls, entry: QuantizedLatentEntry, whole: Any, codes: Any) -> TokenCacheLayer:
        """Make an empty cache layer of packed rows."""
        return TokenCacheLayer(entry.format.row_bytes, entry.format.channels, entry.first_tokens)

    def __init__(self, stock: nn.Module, entry: QuantizedLatentEntry):
        super().__init__(stock, entry)
        self.entry = entry
        self.quantizer = TokenQuantizer(entry.format, entry.correcting)
        self.blocks: BlockwiseRows | None = None  # created by the first blockwise step
        self.expansion: tuple[tuple, HeadPairs | None] | None = None  # version of the weights, and their pairs

    def initialize_weights(self) -> None:
        """Initialize tensors that the base model does not have; loaded tensors stay unchanged."""
        super().initialize_weights()
        self.quantizer.initialize_weights()

    @takes_cache
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        left_padding: LeftPadding | None = None,
        axis_positions: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the output [B, T, D] of hidden_states [B, T, D] and, if eager, weights [B, H, T, S].

        Arguments as in `LatentAttention`; `position_ids` are used only by families that scale queries by position.
        """
        self.quantizer.check()
        batch, num_tokens, _ = hidden_states.shape
        new = self.cache_layer_of(self.entry, None, None)
        layer = layer_of(cache, self.layer_idx, new, batch, left_padding)
        past_length, values = layer.get_seq_length(), self.kv_down(hidden_states).unsqueeze(1)
        cache_positions = torch.arange(past_length + num_tokens, device=values.device)[None]
        positions = cache_positions if axis_positions is None else axis_positions
        query, gate = project_queries(self, hidden_states)
        query = query.transpose(1, 2)
        query = scaled_by_position(
            self, query, cache_positions[:, past_length:] if position_ids is None else position_ids
        )
        kwargs |= {"sliding_window": self.sliding_window, "position_ids": position_ids}
        if (heads := self._expanded_heads(num_tokens)) is not None:
            read, gains = self._read(*self._cached(values, hidden_states, layer), values, layer)
            out, weights = attend_expanded(
                heads, self, query, read, gains, self.rotary(positions), attention_mask, **kwargs
            )
            out = gated(out, gate)
            return self.o_proj(out.reshape(batch, num_tokens, -1)), weights
        query = torch.einsum("bhtd,hdk->bhtk", query, self.query_up)
        out = weights = None
        if self.kernel is not None and axis_positions is None:
            rotated = self._rotated(query, positions[..., past_length:])
            out = self.kernel(self, rotated, values, hidden_states, attention_mask, layer)
        if out is None:
            rows, irms = self._cached(values, hidden_states, layer)
            if axis_positions is None and self._reads_in_blocks(query, layer):
                rotated = self._rotated(query.float(), positions[..., past_length:])
                out = self._attend_in_blocks(rotated, rows, layer, attention_mask).to(query.dtype).transpose(1, 2)
        if out is None:
            read, gains = self._read(rows, irms, values, layer)
            query = self._rotated(query, positions[..., past_length:])
            latent, k_rope = read.split((self.kv_lora_rank, self.rope_dim), dim=-1)
            positional = torch.cat((rotate_pairs(k_rope, *self.rotary(positions)), *gains), dim=-1)
            key, value = self._latent_key_value(latent, positional)
            if self.entry.predicts_values:
                value = read.expand(-1, key.shape[1], -1, -1)
            out, weights = attend(self, query, key, value, attention_mask, **kwargs)
        out = gated(torch.einsum("bthr,hvr->bthv", out, self.value_up), gate)
        return self.o_proj(out.reshape(batch, num_tokens, -1)), weights

    def _rotated(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the last ρ elements of queries [B, H, T, r + ρ] to positions [1, T], or [A, B, T] with A axes."""
        content, turned = query.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        return torch.cat((content, rotate_pairs(turned, *self.rotary(positions))), dim=-1)

    def _cached(
        self, values: torch.Tensor, hidden_states: torch.Tensor, layer: TokenCacheLayer
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cache new tokens [B, 1, T, r + ρ]; return all rows [B, 1, S, ·], and the new tokens' inverse rms or None."""
        rows, irms = self.quantizer.encode(values.detach()), None
        if self.key_norm_eps is not None:
            irms = self._key_irms(hidden_states)
            rows = with_gains(rows, irms)
        return layer.update(rows, values)[0], irms

    def _read(
        self, rows: torch.Tensor, irms: torch.Tensor | None, values: torch.Tensor, layer: TokenCacheLayer
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Decode rows [B, 1, S, ·] into values [B, 1, S, r + ρ] and a list of the gains [B, 1, S, G], or none."""
        packed, gains = self.quantizer.format.row_bytes, []
        if irms is not None:
            gains.append(with_gradient(gains_in(rows, packed).to(values.dtype), irms))
        return layer.with_first(self.quantizer.decode_cached(rows[..., :packed], values)), gains

    def _expanded_heads(self, num_tokens: int) -> HeadPairs | None:
        """Return the channel pairs for expanding a prompt's latents to heads; None to use the absorbed form.

        Expanding saves operations from d new tokens on. Training the up-projections needs the absorbed form, in which
        gradients reach all of their elements.
        """
        weight = self.query_up
        trains = weight.requires_grad or self.value_up.requires_grad
        if num_tokens < self.head_dim or (torch.is_grad_enabled() and trains):
            return None
        if torch.compiler.is_compiling() or weight.is_inference() or weight.is_meta or isinstance(weight, FakeTensor):
            return None
        version = weight.data_ptr(), weight._version, self.value_up.data_ptr(), self.value_up._version
        if self.expansion is None or self.expansion[0] != version:
            turns = list(zip(self.rotary.frequencies, self.rotary.axes or repeat(0), strict=False))
            heads = HeadPairs.of(weight, self.value_up, self.kv_lora_rank, self.num_kv_heads, turns)
            self.expansion = version, heads
        return self.expansion[1]

    def _reads_in_blocks(self, query: torch.Tensor, layer: TokenCacheLayer) -> bool:
        """Return whether `BlockwiseRows` can run: few queries [B, H, T, ·] on a CPU, plain SDPA, no gradients."""
        length, reach = layer.get_seq_length(), layer.padding.most + layer.first
        fits = query.shape[2] <= MOST_QUERIES and reach <= min(length, BLOCK // 2)
        plain = query.device.type == "cpu" and query.dtype != torch.float64 and not self.training
        sdpa = self.config._attn_implementation == "sdpa" and not own_softmax(self.config)
        return fits and plain and sdpa and not query.requires_grad and not torch.compiler.is_compiling()

    def _attend_in_blocks(
        self, query: torch.Tensor, rows: torch.Tensor, layer: TokenCacheLayer, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute outputs [B, H, T, value_width] fp32 of rotated queries [B, H, T, r + ρ] with `BlockwiseRows`."""
        if self.blocks is None:
            runs = self.entry.latent_runs, self.entry.rope_runs
            self.blocks = BlockwiseRows(*runs, self.rotary.inv_freq, self.entry.predicts_values)
        gains = None
        if self.key_norm_eps is not None:
            gains = gains_in(rows, self.quantizer.format.row_bytes)[:, 0].mT.float()  # [B, G, S]
            gains = gains.repeat_interleave(self.num_key_value_groups, dim=1)[:, :, None]
        query, rows = query * self.scaling, rows.squeeze(1)
        first = layer.values.squeeze(1)
        starts = layer.padding.on(rows.device)
        return self.blocks.attend(query, rows, first, self.quantizer, starts, mask=mask, gains=gains)
