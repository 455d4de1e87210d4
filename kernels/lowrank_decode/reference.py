"""PyTorch reference of decode attention over keys rebuilt from latents.

The cache and the up-projection of keys are those of CSKV (arXiv:2409.10593), Palu (arXiv:2407.21118) and, with latents
that several layers share, xKV (arXiv:2503.18893). Values stay latents: attention is linear in them, so the
up-projection of the values is applied once per head to the mixed latent, instead of to every token.

Shapes: B rows, T new tokens, H query heads, G KV heads, d head size, S tokens cached as latents of R elements, of which
a head's key and value read r_k and r_v.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 128
"""Positions between two rows of the second table of `rotation_tables`."""


def rotation_tables(inv_freq: Tensor, positions: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Compute two tables of cosines and sines that give every rotation: R_n = R_{n - n mod 128} R_{n mod 128}.

    A table of all positions would be as large as the latents and double the memory traffic. Computed once per cache.

    Args:
        inv_freq: [d/2], radians per position.
        positions: capacity of the cache in positions.
        dtype: dtype of the tables; the angles are computed in fp64.

    Returns:
        within [2, 128, d/2], the cosines and sines of positions 0 to 127, and begins [2, n, d/2], those of positions 0,
        128, 256, ...
    """
    wide = inv_freq.double()
    first = torch.arange(STEP, device=wide.device, dtype=torch.float64)[:, None] * wide
    every = STEP * torch.arange(max(1, -(-positions // STEP)), device=wide.device, dtype=torch.float64)[:, None] * wide
    within, begins = (torch.stack([angles.cos(), angles.sin()]) for angles in (first, every))
    return within.to(dtype), begins.to(dtype)


def cos_sin(positions: Tensor, within: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines [..., d/2] of positions [...] from `rotation_tables`."""
    near, far = within[:, positions % STEP], begins[:, positions // STEP]
    return near[0] * far[0] - near[1] * far[1], near[1] * far[0] + near[0] * far[1]


def rotated(keys: Tensor, positions: Tensor, within: Tensor, begins: Tensor) -> Tensor:
    """Rotate keys [B, G, n, d] to positions [B, n]; element i pairs with i + d/2."""
    cos, sin = (x.unsqueeze(1) for x in cos_sin(positions.long(), within.to(keys.dtype), begins.to(keys.dtype)))
    real, imag = keys.chunk(2, dim=-1)
    return torch.cat([real * cos - imag * sin, imag * cos + real * sin], dim=-1)


def normalized(keys: Tensor, bias: Tensor | None, norm_weight: Tensor | None, eps: float) -> Tensor:
    """Apply the optional bias [G, d] and RMS norm of weight [d] to keys [B, G, n, d]."""
    if bias is not None:
        keys = keys + bias[:, None]
    if norm_weight is not None:
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        keys = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(keys.dtype) * norm_weight
    return keys


def lowrank_attention(
    query: Tensor,
    latent: Tensor,
    key_up: Tensor,
    scale: float,
    within: Tensor | None = None,
    begins: Tensor | None = None,
    key_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    ranges: list[int] | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of the last T tokens; arguments as in `operator.lowrank_decode`, with both rotation tables.

    Returns:
        out [B, T, H, r_v] and fp32 lse [B, T, H].
    """
    batch, tokens, heads, _ = query.shape
    kv_heads, size = key_up.shape[0], heads // key_up.shape[0]
    held_tokens, device = latent.shape[1], query.device
    row = torch.zeros(batch, dtype=torch.long, device=device)
    length = row + held_tokens if lengths is None else lengths.long()
    start = row if starts is None else starts.long()

    # Tokens that no query sees may hold anything, NaN included.
    positions = torch.arange(held_tokens, device=device)
    own = (length - tokens)[:, None, None] + torch.arange(tokens, device=device)[:, None]  # [B, T, 1]
    visible = (positions >= start[:, None, None]) & (positions <= own)
    latent = latent.masked_fill(~visible.any(1)[..., None], 0)

    reads = None if ranges is None else torch.tensor(ranges, device=device).view(-1, 4)
    keys = _keys(latent, key_up, reads)
    keys = normalized(keys, key_bias, norm_weight, norm_eps)
    if within is not None:
        keys = rotated(keys, torch.where(visible.any(1), positions, 0), within, begins)
    values = _values(latent, reads, kv_heads)
    queries = query.unflatten(2, (kv_heads, size))
    logits = torch.einsum("btgmd,bgsd->btgms", queries, keys) * scale
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits.masked_fill(~visible[:, :, None, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp().to(query.dtype)
    out = torch.einsum("btgms,bgsr->btgmr", weights, values)
    return out.flatten(2, 3), lse.flatten(2).float()


def _keys(latent: Tensor, key_up: Tensor, ranges: Tensor | None) -> Tensor:
    """Rebuild keys [B, G, S, d] from latents, each head from its own range."""
    if ranges is None:
        return torch.einsum("bsr,gdr->bgsd", latent, key_up)
    read = _read(latent, ranges[:, 0], ranges[:, 1], key_up.shape[-1])
    return torch.einsum(
        "bgsr,gdr->bgsd", read, key_up.masked_fill(_past_rank(ranges[:, 1], key_up.shape[-1])[:, None], 0)
    )


def _values(latent: Tensor, ranges: Tensor | None, kv_heads: int) -> Tensor:
    """Return the latents that serve as values of each head [B, G, S, r_v], zero past the head's own rank."""
    if ranges is None:
        return latent[:, None].expand(-1, kv_heads, -1, -1)
    return _read(latent, ranges[:, 2], ranges[:, 3], int(ranges[:, 3].max()))


def _read(latent: Tensor, begin: Tensor, ranks: Tensor, width: int) -> Tensor:
    """Return [B, G, S, width]: `ranks` latent elements from `begin` on for each head, padded with zeros."""
    columns = begin[:, None].long() + torch.arange(width, device=latent.device)
    picked = latent[:, :, columns.clamp(max=latent.shape[-1] - 1)].transpose(1, 2)
    return picked.masked_fill(_past_rank(ranks, width)[:, None], 0)


def _past_rank(ranks: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=ranks.device) >= ranks[:, None]
