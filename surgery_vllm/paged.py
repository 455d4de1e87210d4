"""Attention over latents, or over keys and values, in pages, in plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Queries of a request that are scored at a time: bounds the mask, which has a row for each.
QUERY_TILE = 512


def write_slots(cache: Tensor, vectors: Tensor, slots: Tensor) -> None:
    """Writes a vector for every slot, cache [pages, tokens of a page, …], vectors [T, …]; a negative slot is padding.

    More vectors than slots are padding too.
    """
    kept = slots >= 0
    slots, vectors = slots[kept], vectors[: len(slots)][kept]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = vectors.to(cache.dtype)


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
    pages = -(-int(seq_lens.max()) // cache.shape[1])
    vectors = cache[block_table[:, :pages]].flatten(1, 2).unsqueeze(1).to(query.dtype)  # [B, 1, S, r + ρ (+ G)]
    keys = values = vectors[..., : query.shape[-1]]
    if gains is not None:
        keys = keys * vectors[..., query.shape[-1] :][..., gains].transpose(1, 3)  # [B, G, S, r + ρ]
        values = values.expand(-1, keys.shape[1], -1, -1)
    # Values are whole vectors, rotated keys and all: flash attention wants them as wide as keys.
    return _causal(query, keys, values, seq_lens, scale)[..., :rank]


def paged_rebuilt_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    rebuild: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Causal attention of the newest tokens of some requests over keys and values that latents of theirs make.

    Args:
        query: [B·T, H, d], the T newest tokens of each of B requests, one request after another.
        cache: [pages, tokens of a page, r], latents; the new tokens' are in it.
        block_table: [B, ·] pages of every request, in order.
        seq_lens: [B] tokens of every request, the new ones included.
        scale: of the scores.
        rebuild: from latents [B, S, r] of the first S tokens to keys and values [B, G, S, d].

    Returns:
        [B·T, H, d].
    """
    query = query.unflatten(0, (len(seq_lens), -1)).transpose(1, 2)
    longest = int(seq_lens.max())
    latents = cache[block_table[:, : -(-longest // cache.shape[1])]].flatten(1, 2)[:, :longest]
    return _causal(query, *rebuild(latents.to(query.dtype)), seq_lens, scale)


def _causal(query: Tensor, keys: Tensor, values: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    """Newest queries [B, H, T, w] of requests over all keys [B, ·, S, w] and values → [B·T, H, w]."""
    new = query.shape[2]
    positions = (seq_lens - new)[:, None] + torch.arange(new, device=seq_lens.device)  # [B, T]
    out = []
    for tile, last in zip(query.split(QUERY_TILE, 2), positions.split(QUERY_TILE, 1), strict=True):
        end = int(last.max()) + 1
        seen = torch.arange(end, device=last.device) <= last[:, None, :, None]  # [B, 1, t, S]
        mixed = scaled_dot_product_attention(
            tile, keys[:, :, :end], values[:, :, :end], attn_mask=seen, scale=scale, enable_gqa=True
        )
        out.append(mixed)
    return torch.cat(out, dim=2).transpose(1, 2).flatten(0, 1)


def paged_head_attention(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, scale: float, sinks: int, recent: int | None
) -> Tensor:
    """Causal attention of the newest tokens of some requests over their keys and values.

    Args:
        query: [B·T, H, d], the T newest tokens of each of B requests, one request after another.
        cache: [pages, G, tokens of a page, 2d], keys and values behind them; the new tokens' are in it.
        block_table: [B, ·] pages of every request, in order; those that no query sees may be any.
        seq_lens: [B] tokens of every request, the new ones included.
        scale: of the scores.
        sinks: first tokens that every query sees.
        recent: last tokens that a query sees, its own among them; None: all.

    Returns:
        [B·T, H, d].
    """
    query = query.unflatten(0, (len(seq_lens), -1)).transpose(1, 2)  # [B, H, T, d]
    places = (seq_lens - query.shape[2])[:, None] + torch.arange(query.shape[2], device=seq_lens.device)  # [B, T]
    out = []
    for tile, place in zip(query.split(QUERY_TILE, 2), places.split(QUERY_TILE, 1), strict=True):
        columns = seen_columns(place, cache.shape[2], sinks, recent)
        at = (columns[..., None] * cache.shape[2] + torch.arange(cache.shape[2], device=place.device)).flatten(1)
        # Of a column past the table any page does: its tokens are none of the request's.
        pages = block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))
        keys, values = cache[pages].transpose(1, 2).flatten(2, 3).to(tile.dtype).chunk(2, dim=-1)  # [B, G, S, d]
        key_at, query_at = at[:, None, None], place[:, None, :, None]
        seen = key_at <= query_at
        if recent is not None:
            seen &= (query_at - key_at < recent) | (key_at < sinks)
        out.append(scaled_dot_product_attention(tile, keys, values, attn_mask=seen, scale=scale, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2).flatten(0, 1)


def seen_columns(places: Tensor, page: int, sinks: int, recent: int | None) -> Tensor:
    """Columns of the block table that hold what queries see: sinks' first, then the window's, none twice.

    Args:
        places: [B, T] positions of the queries, neighbours in order.
        page: tokens of one.
        sinks: first tokens that are seen.
        recent: last tokens that are seen; None: all.

    Returns:
        [B, ·] int64; columns behind a request's last query may be among them.
    """
    first = torch.zeros_like(places[:, 0])
    sink_columns = 0
    if recent is not None:
        sink_columns = -(-sinks // page)
        first = ((places[:, 0] - recent + 1) // page).clamp(min=sink_columns)
    count = int((places[:, -1] // page + 1 - first).max().clamp(min=0))
    window = first[:, None] + torch.arange(count, device=places.device)
    sink = torch.arange(sink_columns, device=places.device).expand(len(places), -1)
    return torch.cat((sink, window), dim=1)
