"""A layer of multi-head latent attention (MLA) as a source: what a smaller latent is made from, and made as.

Shapes: ``H`` query heads, ``r`` latents, ``ρ`` rotary dimensions, ``n`` unrotated numbers of a head's query and key,
``e`` values of a head, ``D`` hidden size. What is cached of an input x is one latent and one rotary key for all heads:

    a      = (down x)[:r]                       the latent before its norm
    c      = a / sqrt(mean(a²) + eps)           the latent; the norm's weight is folded into ``up``
    k_rope = rot((down x)[r:])
    key_h  = [up_h[:n] c ; k_rope],  value_h = up_h[n:] c

Statistics read it as an attention of one KV head, whose keys are the rotary keys and whose values are the latents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from surgery.families.anatomy import HeadNorm, LayerAnatomy, Projection


@dataclass(frozen=True)
class LatentProjection(Projection):
    """Projections of an MLA layer before any rotation.

    ``q`` [..., H, ρ] and ``k`` [..., 1, ρ] are what is rotated, ``v`` [..., 1, r] is the latent after its norm.
    """

    unrotated: Tensor  # [..., H, n], the other part of the queries


@dataclass(frozen=True)
class LatentAnatomy(LayerAnatomy):
    """One MLA layer. Rotary pairs are half-split, whatever the checkpoint's order."""

    PROJECTIONS = (
        ("q", "q_proj or q_b_proj"),
        ("q_down", "q_a_proj"),
        ("down", "kv_a_proj_with_mqa"),
        ("up", "kv_b_proj"),
        ("o", "o_proj"),
    )

    q: Tensor  # [H, n + ρ, D], or [H, n + ρ, q] after a query latent
    down: Tensor  # [r + ρ, D]
    up: Tensor  # [H, n + e, r], the norm's weight included
    o: Tensor  # [D, H, e]
    inv_freq: Tensor  # [ρ/2], float64, radians per token
    eps: float  # of the latent's norm
    unrotated_dim: int  # n
    down_bias: Tensor | None = None  # [r + ρ]
    o_bias: Tensor | None = None  # [D]
    q_down: Tensor | None = None  # [q, D]
    q_down_bias: Tensor | None = None  # [q]
    q_norm: HeadNorm | None = None  # [q]
    order: Tensor | None = None  # [ρ], of each row of the rotary key the row in the checkpoint; None: the same
    rope_factor: float = 1.0  # what RoPE multiplies the rotated part of queries and keys by (YaRN)
    k_norm: None = None  # of keys, which have none

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
        """Numbers of the one key that is cached, ρ."""
        return len(self.down) - self.rank

    @property
    def hidden(self) -> int:
        return self.down.shape[1]

    @property
    def kv_width(self) -> int:
        """Numbers that the layer caches per token."""
        return len(self.down)

    def latent(self, x: Tensor) -> Tensor:
        """Latents [..., r] of inputs [..., D], before their norm."""
        bias = None if self.down_bias is None else self.down_bias[: self.rank]
        return linear(x, self.down[: self.rank], bias)

    def gain(self, latent: Tensor) -> Tensor:
        """Return the factor by which the norm multiplies a latent [..., r], [..., 1]."""
        return (latent.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def project(self, x: Tensor) -> LatentProjection:
        """Queries, rotary key and latent of inputs ``x`` [..., D]."""
        query_latent = x if self.q_down is None else self.q_norm(linear(x, self.q_down, self.q_down_bias))
        queries = linear(query_latent, self.q.flatten(0, 1)).unflatten(-1, self.q.shape[:2])
        unrotated, rotated = queries.split([self.unrotated_dim, self.head_dim], dim=-1)
        latent, key = linear(x, self.down, self.down_bias).split([self.rank, self.head_dim], dim=-1)
        latent = latent * self.gain(latent)
        return LatentProjection(rotated, key[..., None, :], latent[..., None, :], None, unrotated)

    def expanded(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Unrotated keys [..., H, n] and values [..., H, e] of latents [..., r] after their norm."""
        heads = torch.einsum("...r,hnr->...hn", latent, self.up)
        return heads[..., : self.unrotated_dim], heads[..., self.unrotated_dim :]
