"""Softmax of attention with scale, cap and sinks, shared by all simulations of attention.

For products p of queries and keys, cap c and learned sink s_h of head h:

    logits  = scale * p,  or  c tanh(scale * p / c)             Gemma 2 (arXiv:2408.00118, §2)
    weights = exp(logits) / (Σ exp(logits) + exp(s_h))          gpt-oss (arXiv:2508.10925, §2.2); without sinks, no s_h
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from surgery.kernels.mla_decode.reference import causal_mask


@dataclass(frozen=True)
class Softmax:
    """Softmax of one attention layer.

    Attributes:
        scale: factor on products of queries and keys.
        softcap: cap c of the logits; None for no cap.
        sinks: [H], one more logit per head, whose weight has no value; None for no sinks.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True if PyTorch's fused attention computes it: no cap, no sinks."""
        return self.softcap is None and self.sinks is None

    def logits(self, products: Tensor) -> Tensor:
        """Scale and cap products of queries and keys [...]."""
        scaled = products if self.scale == 1.0 else products * self.scale
        return scaled if self.softcap is None else (scaled / self.softcap).tanh() * self.softcap

    def normalized(self, logits: Tensor) -> Tensor:
        """Compute weights [..., H, T, S] from logits, -inf for masked keys; a row and its sink sum to 1."""
        if self.sinks is None:
            return logits.softmax(-1)
        sinks = self.sinks.to(logits)[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]

    def weights(self, products: Tensor, mask: Tensor) -> Tensor:
        """Compute weights [..., H, T, S] from products; ``mask`` [..., T, S] is True for visible keys, or additive."""
        logits = self.logits(products)
        return self.normalized(logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the attention output [B, H, T, e] of queries [B, H, T, d] over keys and values [B, G, S, ·].

        ``mask`` is as in :meth:`weights`; None means causal attention of a prompt, or one query over all keys.
        """
        heads, groups, width = q.shape[1], k.shape[1], v.shape[-1]
        causal = mask is None and q.shape[2] > 1
        if self.plain:
            # The fused kernels need keys and values of equal width; unfused attention takes five times as long.
            v = pad(v, (0, max(0, k.shape[-1] - width)))
            attn_output = scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=self.scale, enable_gqa=groups != heads
            )
            return attn_output[..., :width]
        if mask is None:
            mask = causal_mask(q.shape[2], k.shape[2], None, q.device)
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        return self.weights(q @ k.mT, mask) @ v
