"""Softmax of attention: scale, cap and sinks, in one place for all that simulates attention.

With p the products, c the cap and s_h the learned sink of head h:

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
    """The softmax of one attention layer.

    Attributes:
        scale: multiplies products of queries and keys.
        softcap: c, which bounds logits; None: no cap.
        sinks: [H], a logit of each head next to those of all keys, whose weight mixes nothing; None: no sinks.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Return whether PyTorch's fused attention computes it."""
        return self.softcap is None and self.sinks is None

    def logits(self, products: Tensor) -> Tensor:
        """Scaled products, below the cap; [...]."""
        scaled = products if self.scale == 1.0 else products * self.scale
        return scaled if self.softcap is None else (scaled / self.softcap).tanh() * self.softcap

    def normalized(self, logits: Tensor) -> Tensor:
        """Weights [..., H, T, S] of logits, those of keys that are not seen -inf; a row and its sink sum to 1."""
        if self.sinks is None:
            return logits.softmax(-1)
        sinks = self.sinks.to(logits)[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]

    def weights(self, products: Tensor, mask: Tensor) -> Tensor:
        """Weights [..., H, T, S] of products; ``mask`` [..., T, S] is true where a key is seen, or added to logits."""
        logits = self.logits(products)
        return self.normalized(logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mixed values [B, H, T, e] of queries [B, H, T, d] over keys and values [B, G, S, ·].

        ``mask`` is as in :meth:`weights`; None is causal attention of a prompt to itself, or of one query to all.
        """
        heads, groups, width = q.shape[1], k.shape[1], v.shape[-1]
        causal = mask is None and q.shape[2] > 1
        if self.plain:
            # The fused kernels want keys and values of one width; without them this takes five times as long.
            v = pad(v, (0, max(0, k.shape[-1] - width)))
            attn_output = scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=self.scale, enable_gqa=groups != heads
            )
            return attn_output[..., :width]
        if mask is None:
            mask = causal_mask(q.shape[2], k.shape[2], None, q.device)
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        return self.weights(q @ k.mT, mask) @ v
