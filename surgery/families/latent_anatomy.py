"""Anatomy of a multi-head latent attention (MLA) layer: source and result of a conversion to a smaller latent.

Shapes: ``H`` query heads, ``r`` rank, ``ρ`` rotary dimensions, ``n`` unrotated dimensions of a head's query and key,
``e`` head dimension of values, ``D`` hidden size. All heads share the cache of an input x, a latent and a rotary key:

    a      = (down x)[:r]                       the latent before its norm
    c      = a / sqrt(mean(a²) + eps)           the latent; the norm's weight is folded into ``up``
    k_rope = rot((down x)[r:])
    key_h  = [up_h[:n] c ; k_rope],  value_h = up_h[n:] c

Statistics treat it as attention with one KV head, whose keys are the rotary keys and whose values are the latents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from surgery.families.anatomy import HeadNorm, LayerAnatomy, Projection


@dataclass(frozen=True)
class LatentProjection(Projection):
    """Projections of an MLA layer before RoPE.

    ``q`` [..., H, ρ] and ``k`` [..., 1, ρ] are the rotary parts; ``v`` [..., 1, r] is the latent after its norm.
    """

    unrotated: Tensor  # [..., H, n], the unrotated part of the queries


@dataclass(frozen=True)
class LatentAnatomy(LayerAnatomy):
    """One MLA layer. Rotary pairs are half-split for every checkpoint."""

    PROJECTIONS = (
        ("q", "q_proj or q_b_proj"),
        ("q_down", "q_a_proj"),
        ("down", "kv_a_proj_with_mqa"),
        ("up", "kv_b_proj"),
        ("o", "o_proj"),
    )
    k_norm = None  # MLA has no key norm

    q: Tensor  # [H, n + ρ, D], or [H, n + ρ, q] after a query latent
    down: Tensor  # [r + ρ, D]
    up: Tensor  # [H, n + e, r], the norm's weight included
    o: Tensor  # [D, H, e]
    inv_freq: Tensor  # [ρ/2], float64, radians per token
    eps: float  # eps of the latent's norm
    unrotated_dim: int  # n
    down_bias: Tensor | None = None  # [r + ρ]
    o_bias: Tensor | None = None  # [D]
    q_down: Tensor | None = None  # [q, D]
    q_down_bias: Tensor | None = None  # [q]
    q_norm: HeadNorm | None = None  # [q]
    order: Tensor | None = None  # [ρ], checkpoint row of each row of the rotary key; None: same order
    rope_factor: float = 1.0  # RoPE's factor on the rotary part of queries and keys (YaRN)

    @property
    def heads(self) -> int:
        return self.q.shape[0]

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def rank(self) -> int:
        return self.up.shape[-1]

    @property
    def head_dim(self) -> int:
        """Dimension of the cached rotary key, ρ."""
        return len(self.down) - self.rank

    @property
    def hidden(self) -> int:
        return self.down.shape[1]

    @property
    def kv_width(self) -> int:
        """Elements that the layer caches per token, r + ρ."""
        return len(self.down)

    def latent(self, x: Tensor) -> Tensor:
        """Compute latents [..., r] of inputs [..., D], before their norm."""
        bias = None if self.down_bias is None else self.down_bias[: self.rank]
        return linear(x, self.down[: self.rank], bias)

    def gain(self, latent: Tensor) -> Tensor:
        """Compute the inverse RMS [..., 1] of latents [..., r]."""
        return (latent.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def project(self, x: Tensor) -> LatentProjection:
        """Project inputs ``x`` [..., D] to queries, rotary key and latent."""
        query_latent = x if self.q_down is None else self.q_norm(linear(x, self.q_down, self.q_down_bias))
        queries = linear(query_latent, self.q.flatten(0, 1)).unflatten(-1, self.q.shape[:2])
        unrotated, rotated = queries.split([self.unrotated_dim, self.head_dim], dim=-1)
        latent, key = linear(x, self.down, self.down_bias).split([self.rank, self.head_dim], dim=-1)
        latent = latent * self.gain(latent)
        return LatentProjection(rotated, key[..., None, :], latent[..., None, :], None, unrotated)

    def expanded(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Up-project latents [..., r], after their norm, to unrotated keys [..., H, n] and values [..., H, e]."""
        heads = torch.einsum("...r,hnr->...hn", latent, self.up)
        return heads[..., : self.unrotated_dim], heads[..., self.unrotated_dim :]
