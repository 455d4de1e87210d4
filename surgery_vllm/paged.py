"""Attention over latents in pages, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Queries of a request that are scored at a time: bounds the mask, which has a row for each.
QUERY_TILE = 512


def paged_latent_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    rank: int,
    scale: float,
    gains: slice | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of some requests over the latents of all their tokens.

    Args:
        query: [B·T, H, r + ρ], the T newest tokens of each of B requests, one request after another, in the space of
            the cached vectors.
        cache: [pages, tokens of a page, r + ρ (+ G)], latents, rotated keys and gains; the new tokens' are in it.
        block_table: [B, ·] pages of every request, in order.
        seq_lens: [B] tokens of every request, the new ones included.
        rank: r.
        scale: of the scores.
        gains: which of the numbers behind r + ρ scale the scores of a token, one for each of as many groups of
            neighbouring heads; None: none do.

    Returns:
        [B·T, H, r], the mean of the latents by the softmax of the scores.
    """
    query = query.unflatten(0, (len(seq_lens), -1)).transpose(1, 2)  # [B, H, T, r + ρ]
    new = query.shape[2]
    pages = -(-int(seq_lens.max()) // cache.shape[1])
    vectors = cache[block_table[:, :pages]].flatten(1, 2).unsqueeze(1).to(query.dtype)  # [B, 1, S, r + ρ (+ G)]
    keys = values = vectors[..., : query.shape[-1]]
    if gains is not None:
        keys = keys * vectors[..., query.shape[-1] :][..., gains].transpose(1, 3)  # [B, G, S, r + ρ]
        values = values.expand(-1, keys.shape[1], -1, -1)
    positions = (seq_lens - new)[:, None] + torch.arange(new, device=seq_lens.device)  # [B, T]
    out = []
    for tile, last in zip(query.split(QUERY_TILE, 2), positions.split(QUERY_TILE, 1), strict=True):
        end = int(last.max()) + 1
        seen = torch.arange(end, device=last.device) <= last[:, None, :, None]  # [B, 1, t, S]
        # Values are whole vectors, rotated keys and all: flash attention wants them as wide as keys.
        mixed = scaled_dot_product_attention(
            tile, keys[:, :, :end], values[:, :, :end], attn_mask=seen, scale=scale, enable_gqa=True
        )
        out.append(mixed[..., :rank])
    return torch.cat(out, dim=2).transpose(1, 2).flatten(0, 1)
