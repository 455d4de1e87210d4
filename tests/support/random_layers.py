"""Attention layers in float64: of random numbers and no model, and what conversions make of a layer."""

import torch
from torch import Tensor

from surgery.families.anatomy import AttentionAnatomy, HeadNorm
from surgery.transforms.algebra import reduced_rank_projection
from surgery.transforms.key_basis import energy_basis
from surgery.transforms.latent_layer import LatentLayer
from surgery.transforms.low_rank_layer import LowRankLayer
from surgery.transforms.partial_rope import latent_form, latent_rows


def random(*shape: int, seed: int) -> Tensor:
    """Normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def latent_mask(layer: LowRankLayer) -> Tensor:
    """Return the columns of ``key_up``, and after them of ``value_up``, that may be used, bool [2 G, s + r]."""
    masks = torch.zeros(2, layer.source.kv_heads, layer.shared + layer.rank, dtype=torch.bool)
    masks[..., : layer.shared] = True
    start = layer.shared
    for block in layer.blocks:
        for mask, heads in zip(masks, (block.keys, block.values), strict=True):
            mask[list(heads), start : start + block.rank] = True
        start += block.rank
    return masks.flatten(0, 1)


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


def truncated(anatomy: AttentionAnatomy, x: Tensor, rotated: int, rank: int) -> tuple[LatentLayer, Tensor, Tensor]:
    """A layer in latent form with its first ``rotated`` numbers rotated, and the best factors down and up of a rank."""
    projection, groups, dim = anatomy.project(x), anatomy.kv_heads, anatomy.head_dim
    z = torch.cat([projection.k.flatten(2), projection.v.flatten(2)], dim=-1).flatten(0, 1)
    moment = z.T @ z / len(z)
    basis = energy_basis(moment[: groups * dim, : groups * dim].view(groups, dim, groups, dim), None)
    rows = latent_rows(anatomy, basis, torch.arange(rotated))
    down, up, _ = reduced_rank_projection(rows @ moment @ rows.T, torch.eye(len(rows), dtype=torch.float64), rank)
    return latent_form(anatomy, basis, torch.arange(rotated)), down, up


def random_layer(dtype: torch.dtype = torch.float32) -> tuple[AttentionAnatomy, Tensor]:
    """A layer with biases and a key norm, and its inputs [3, 20, D]."""
    norm = HeadNorm(random(6, seed=9).abs() + 0.5, 1e-6)
    anatomy = random_attention(8, 4, 40, 6, biased=True, k_norm=norm).to(dtype)
    return anatomy, (random(3, 20, 40, seed=20) / 40**0.5).to(dtype)
