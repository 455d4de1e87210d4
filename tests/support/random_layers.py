"""Attention layers of random numbers in float64, of no model."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.families.anatomy import AttentionAnatomy


def random(*shape: int, seed: int) -> Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_attention(
    heads: int, kv_heads: int, hidden: int, dim: int, *, biased: bool, bias_size: float = 1.0, **own
) -> AttentionAnatomy:
    """One whose KV heads have nothing in common; ``own`` are more of its fields, ``bias_size`` of keys and values."""
    return AttentionAnatomy(
        q=random(heads, dim, hidden, seed=1),
        k=random(kv_heads, dim, hidden, seed=2),
        v=random(kv_heads, dim, hidden, seed=3),
        o=random(hidden, heads, dim, seed=4),
        inv_freq=torch.tensor([1.0, 0.2, 0.05], dtype=torch.float64),
        scale=0.1,
        q_bias=random(heads, dim, seed=5) if biased else None,
        k_bias=bias_size * random(kv_heads, dim, seed=6) if biased else None,
        v_bias=bias_size * random(kv_heads, dim, seed=7) if biased else None,
        **own,
    )
