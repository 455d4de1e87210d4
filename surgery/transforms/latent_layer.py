"""Latent form of an attention layer, the result of every MLA conversion, and its simulation.

An attention layer in latent form caches one latent ``c`` [r] and one shared rotary key [ρ] per token:

    [c ; k_rope] = down x + down_bias                              cached (k_rope after rotation)
    query_h      = q_h @ query_up[h]                               q_h: the source's query before RoPE
    logit_h(m,n) = scale * (query_h[:r] . c_n + rot(query_h[r:], m) . rot(k_rope, n)) * key_gain
    output       = Σ_h o_h value_up[h] Σ_n p_h(m,n) c_n

Quantized MLA may read values from the shared key before its rotation too: ``value_up`` has r + ρ columns then.
Merging the heads of a GQA layer into this form is exact (ρ = G d, r = G e); every step after it changes the basis or
drops columns. Rotary pairs of the latent form are half-split: (i, i + ρ/2) has the frequency ``inv_freq[i]``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from surgery.families.anatomy import AttentionAnatomy, Projection, moved
from surgery.families.attention import attend, causal_attention
from surgery.families.rope import phases, rotate
from surgery.transforms.row_quantizer import Read


def interleaving(rope_dim: int) -> Tensor:
    """Return, for each row of an interleaved layout, its index in the half-split layout."""
    return torch.arange(rope_dim).view(2, -1).T.flatten()


@dataclass(frozen=True)
class LatentLayer:
    """One attention layer in latent form; queries, norms, scale and window come from ``source``.

    ``rotates_all`` states that no key is in the latent and all keep the source's frequencies.
    """

    source: AttentionAnatomy
    down: Tensor  # [r + ρ, D]
    down_bias: Tensor | None  # [r + ρ]
    query_up: Tensor  # [H, d, r + ρ]
    value_up: Tensor  # [H, e, r], or [H, e, r + ρ] of a layer that rotates all keys
    inv_freq: Tensor  # [ρ/2], float64
    o: Tensor  # [D, H, e]
    rotates_all: bool = False

    @property
    def rank(self) -> int:
        return len(self.down) - self.rope_dim

    @property
    def rope_dim(self) -> int:
        return 2 * len(self.inv_freq)

    def neighboring(self) -> Tensor:
        """Return the channel order [r + ρ] of the custom model class, which interleaves rotary pairs."""
        return torch.cat([torch.arange(self.rank), self.rank + interleaving(self.rope_dim)])

    def to(self, *args, **kwargs) -> LatentLayer:
        """Return a copy with every tensor but ``inv_freq`` moved or cast."""
        return moved(self, *args, **kwargs)

    def rescaled(self, latent: float, rope_key: float) -> LatentLayer:
        """Scale latents and rotary keys without changing the function, exactly for powers of two."""
        rank, width = self.rank, len(self.down)
        factors = torch.full((width,), latent, dtype=self.down.dtype, device=self.down.device)
        factors[rank:] = rope_key
        return replace(
            self,
            down=self.down * factors[:, None],
            down_bias=None if self.down_bias is None else self.down_bias * factors,
            query_up=self.query_up / factors,
            value_up=self.value_up / latent,
        )

    def compress(self, x: Tensor, read: Read | None = None) -> tuple[Tensor, Tensor]:
        """Compress inputs ``x`` [B, T, D] to latents [B, T, r] and rotated keys [B, T, ρ].

        Args:
            read: function from cached values [B, T, r + ρ] before RoPE to those that a lossy cache returns, or None.
        """
        cached = nn.functional.linear(x, self.down, self.down_bias)
        cached = cached if read is None else read(cached)
        latent, rope_key = cached.split([self.rank, self.rope_dim], dim=-1)
        return latent, rotate(rope_key[:, :, None], self._phase(x))[:, :, 0]

    def queries(self, x: Tensor) -> Tensor:
        """Compute absorbed queries [B, T, H, r + ρ], the last ρ channels rotated."""
        query = torch.einsum("bthd,hdc->bthc", self.source.project_queries(x), self.query_up)
        content, rope = query.split([self.rank, self.rope_dim], dim=-1)
        return torch.cat([content, rotate(rope, self._phase(x))], dim=-1)

    def attend(self, x: Tensor, read: Read | None = None) -> Tensor:
        """Compute head outputs [B, T, H, e] before the output projection; ``read`` as for :meth:`compress`."""
        if self.rotates_all:
            return self._attend_expanded(x, read)
        latent, positional = self.compress(x, read)
        gain = self.source.project_key_gain(x)
        if gain is not None:
            positional = torch.cat([positional, gain], dim=-1)
        queries, cached = self.queries(x).transpose(1, 2), self._keys_and_values(latent[:, None], positional[:, None])
        attn_output = causal_attention(self.source, queries, *cached)
        return torch.einsum("bhtr,her->bthe", attn_output, self.value_up)

    def _attend_expanded(self, x: Tensor, read: Read | None) -> Tensor:
        """Compute :meth:`attend` of a layer that rotates all keys, with a key and a value for each KV head.

        ``query_up`` commutes with rotation, so it may map keys back to heads, which are narrower, instead of queries.
        """
        source, cached = self.source, nn.functional.linear(x, self.down, self.down_bias)
        cached = cached if read is None else read(cached)
        query_up, value_up = (each[:: source.heads // source.kv_heads] for each in (self.query_up, self.value_up))
        keys = torch.einsum("btc,gdc->btgd", cached, query_up)
        values = torch.einsum("btr,ger->btge", cached[..., : value_up.shape[-1]], value_up)
        return attend(source, Projection(source.project_queries(x), keys, values, source.project_key_gain(x)))

    def _keys_and_values(self, latent: Tensor, positional: Tensor) -> tuple[Tensor, Tensor]:
        """Expand a latent [B, 1, T, r] to keys [B, H, T, r + ρ] and values [B, H, T, r].

        ``positional`` [B, 1, T, ρ (+ G)] holds rotated keys and, for layers with a key norm, the gain of every head.
        """
        key = torch.cat([latent, positional[..., : self.rope_dim]], dim=-1)
        if positional.shape[-1] > self.rope_dim:
            key = key * positional[:, 0, :, self.rope_dim :].mT[..., None]
        key = key.repeat_interleave(self.source.heads // key.shape[1], dim=1)
        return key, latent.expand(-1, self.source.heads, -1, -1)

    def forward(self, x: Tensor, read: Read | None = None) -> Tensor:
        """Compute the layer's output [B, T, D] for a causal prompt; ``read`` as for :meth:`compress`."""
        out = torch.einsum("bthe,xhe->btx", self.source.gated(self.attend(x, read), x), self.o)
        return out if self.source.o_bias is None else out + self.source.o_bias

    def _phase(self, x: Tensor) -> Tensor:
        return phases(self.inv_freq, torch.arange(x.shape[1], device=x.device), x.dtype)


class SimulatedAttention(nn.Module):
    """Surrogate for a transformers attention module that computes a latent layer; prompts only, no cache.

    Args:
        read: as for :meth:`LatentLayer.compress`.
    """

    def __init__(self, layer: LatentLayer, read: Read | None = None):
        super().__init__()
        self.layer, self.read = layer, read

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        return self.layer.forward(hidden_states, self.read), None
