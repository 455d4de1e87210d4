"""Attention over latents, or over keys and values, in pages, in plain PyTorch.

Two products and a softmax for a tile of queries at a time, in which the query heads that share a key are rows of one
matrix: on a CPU that is faster than PyTorch's fused attention, which reads keys once for every head, and needs no mask
but behind the first new token. Scores have the dtype of the queries, as transformers' eager attention has them; in
bfloat16 SmolLM2 was as near to float32 by that, in transformers, as by the fused one (KL 1.31e-3 each).

Prompts too are scored against latents. Rebuilding keys and values of every head first saves products only where the
latent is much wider than a head; at 68 + 28 numbers and nine heads of 64 it took 1.2 to 1.7 times as long on a CPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Scores that are held at a time, of all heads: as many as stay in a processor's cache.
SCORES = 2**20
# Keys of a tile are read in steps of so many: products of few shapes, which libraries prepare once each.
KEY_STEP = 64
# Queries that are scored at a time over sinks and a window: each tile gathers what its queries see.
QUERY_TILE = 128


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
    vectors = gathered(cache, block_table, int(seq_lens.max())).to(query.dtype).unsqueeze(1)  # [B, 1, S, r + ρ (+ G)]
    keys = vectors[..., : query.shape[-1]]
    if gains is not None:
        keys = keys * vectors[..., query.shape[-1] :][..., gains].transpose(1, 3)  # [B, G, S, r + ρ]
    return causal(query, keys, vectors[..., :rank], seq_lens, scale)


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
    longest = int(seq_lens.max())
    latents = gathered(cache, block_table, longest)[:, :longest].to(query.dtype)
    return causal(query, *rebuild(latents), seq_lens, scale)


def gathered(cache: Tensor, block_table: Tensor, tokens: int) -> Tensor:
    """Vectors of the first tokens of some requests, in whole pages: cache [pages, tokens of a page, …] → [B, S, …]."""
    columns = block_table[:, : -(-tokens // cache.shape[1])]
    # Several times faster than indexing by a matrix, on a CPU.
    return cache.index_select(0, columns.flatten()).view(len(columns), -1, *cache.shape[2:])


def causal(query: Tensor, keys: Tensor, values: Tensor, seq_lens: Tensor, scale: float) -> Tensor:
    """Newest queries of requests over the keys and values of all their tokens.

    Args:
        query: [B·T, H, w].
        keys: [B, G, S, w] of S tokens, the longest request's or more; what is behind a request's own is not seen.
        values: [B, G or 1, S, v].
        seq_lens: [B] tokens of every request.
        scale: of the scores.

    Returns:
        [B·T, H, v].
    """
    query = by_key(query * scale, keys.shape[:2])
    batch, groups, new, heads, _ = query.shape
    shortest, longest = int(seq_lens.min()), int(seq_lens.max())
    out = values.new_empty(batch, new, groups, heads, values.shape[-1])
    tile = min(max(SCORES // (batch * groups * heads * longest), 1), new)
    # Of every tile the same: keys behind the first query's own, of the shortest request, that a query does not see.
    place = (seq_lens - shortest)[:, None] + torch.arange(tile, device=seq_lens.device)  # [B, t]
    behind = torch.arange(1, keys.shape[2] - shortest + new, device=seq_lens.device)
    hidden = behind > place[..., None]
    for first in range(0, new, tile):
        rows, ahead = query[:, :, first : first + tile], first - new
        end = min(longest + ahead + rows.shape[2] + KEY_STEP - 1, keys.shape[2])
        end -= end % KEY_STEP if end < keys.shape[2] else 0
        if batch > 1:  # PyTorch would copy a part of every request's keys, which takes longer than to read all
            end = keys.shape[2]
        unseen = hidden[:, : rows.shape[2], : end - shortest - ahead - 1]
        out[:, first : first + tile] = mixed(rows, keys[:, :, :end], values[:, :, :end], unseen)
    return out.flatten(2, 3).flatten(0, 1)


def by_key(query: Tensor, requests_and_groups: tuple[int, int]) -> Tensor:
    """[B·T, H, w] → [B, G, T, H/G, w]: what reads one key is one matrix."""
    requests, groups = requests_and_groups
    return query.view(requests, -1, groups, query.shape[1] // groups, query.shape[2]).transpose(1, 2).contiguous()


def mixed(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Scaled queries [B, G, t, h, w] over keys [B, G, S, w] and values [B, G or 1, S, v] → [B, t, G, h, v].

    ``hidden`` [B, t, U] says of the last U keys which a query does not see.
    """
    batch, groups, tile, heads, _ = query.shape
    scores = product(query.flatten(2, 3), keys.mT)
    last = scores.view(batch, groups, tile, heads, -1)[..., keys.shape[2] - hidden.shape[2] :]
    last.masked_fill_(hidden[:, None, :, None], -torch.inf)
    weights = scores.softmax(-1).view(batch, values.shape[1], -1, keys.shape[2])
    return product(weights, values).view(batch, groups, tile, heads, -1).transpose(1, 2)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Matrices [B, G, ·, ·] times matrices.

    One alone is no batch: of few rows, in bfloat16, that takes PyTorch four times as long on a CPU.
    """
    if left.shape[:2] == (1, 1):
        return (left[0, 0] @ right[0, 0])[None, None]
    return left @ right


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
    dtype = query.dtype
    if recent is None:
        pages = block_table[:, : -(-int(seq_lens.max()) // cache.shape[2])]
        return causal(query, *gathered_heads(cache, pages, dtype), seq_lens, scale)
    query = by_key(query * scale, (len(seq_lens), cache.shape[1]))
    new = query.shape[2]
    places = (seq_lens - new)[:, None] + torch.arange(new, device=seq_lens.device)  # [B, T]
    out = []
    for tile, place in zip(query.split(QUERY_TILE, 2), places.split(QUERY_TILE, 1), strict=True):
        columns = seen_columns(place, cache.shape[2], sinks, recent)
        at = (columns[..., None] * cache.shape[2] + torch.arange(cache.shape[2], device=place.device)).flatten(1)
        # Of a column past the table any page does: its tokens are none of the request's.
        pages = block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))
        key_at, query_at = at[:, None], place[..., None]
        dropped = (query_at - key_at >= recent) & (key_at >= sinks)
        hidden = dropped | (key_at > query_at)
        keys, values = gathered_heads(cache, pages, dtype)
        out.append(mixed(tile, keys, values, hidden))
    return torch.cat(out, dim=1).flatten(2, 3).flatten(0, 1)


def gathered_heads(cache: Tensor, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, G, S, d] of pages [B, ·] of a cache [pages, G, tokens of a page, 2d]."""
    found = cache.index_select(0, pages.flatten()).unflatten(0, pages.shape)
    return found.transpose(1, 2).flatten(2, 3).to(dtype).chunk(2, dim=-1)


def seen_columns(places: Tensor, page: int, sinks: int, recent: int) -> Tensor:
    """Columns of the block table that hold what queries see: sinks' first, then the window's, none twice.

    Args:
        places: [B, T] positions of the queries, neighbours in order.
        page: tokens of one.
        sinks: first tokens that are seen.
        recent: last tokens that are seen.

    Returns:
        [B, ·] int64; columns behind a request's last query may be among them.
    """
    sink_columns = -(-sinks // page)
    first = ((places[:, 0] - recent + 1) // page).clamp(min=sink_columns)
    count = int((places[:, -1] // page + 1 - first).max().clamp(min=0))
    window = first[:, None] + torch.arange(count, device=places.device)
    sink = torch.arange(sink_columns, device=places.device).expand(len(places), -1)
    return torch.cat((sink, window), dim=1)
