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

from surgery_vllm.spans import Span

# Scores that are held at a time, of all heads: as many as stay in a processor's cache.
SCORES = 2**20
# Keys of a tile are read in steps of so many: products of few shapes, which libraries prepare once each.
KEY_STEP = 64
# Queries that are scored at a time over sinks and a window: each tile gathers what its queries see.
QUERY_TILE = 128


def write_slots(cache: Tensor, vectors: Tensor, slots: Tensor) -> None:
    """Writes a vector for every slot, cache [pages, tokens of a page, …], vectors [T, …]; a negative slot is padding.

    More vectors than slots are padding too. Padding writes to slot 0 the vector that is there: to drop it would take
    the host to count it, and slot 0 lies in vLLM's null block, which is no request's.
    """
    padding = (slots < 0).view(-1, *[1] * (vectors.dim() - 1))
    slots, vectors = slots.clamp(min=0), vectors[: len(slots)].to(cache.dtype)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.where(padding, cache[0, 0], vectors)


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Read the vectors of slots [T] of a cache [pages, tokens of a page, …] → [T, …]; those of padding may be any."""
    slots = slots.clamp(min=0)
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def latent_attention(
    query: Tensor, vectors: Tensor, span: Span, rank: int, scale: float, gains: slice | None = None
) -> Tensor:
    """Causal attention of the newest tokens of some requests over the latents of all their tokens.

    Args:
        query: [B·T, H, r + ρ], the T newest tokens of each of B requests, one request after another, in the space of
            the cached vectors.
        vectors: [B, S, r + ρ (+ G)], latents, rotated keys and gains of their first S tokens, the new ones included;
            what is after a request's own tokens may be any.
        span: the requests.
        rank: r.
        scale: of the scores.
        gains: which of the numbers behind r + ρ scale the scores of a token, one for each of as many groups of
            neighboring heads; None: none do.

    Returns:
        [B·T, H, r], the mean of the latents by the softmax of the scores.
    """
    vectors = vectors.unsqueeze(1)  # [B, 1, S, r + ρ (+ G)]
    keys = vectors[..., : query.shape[-1]]
    if gains is not None:
        keys = keys * vectors[..., query.shape[-1] :][..., gains].transpose(1, 3)  # [B, G, S, r + ρ]
    return causal(query, keys, vectors[..., :rank], span, scale)


def rebuilt_attention(
    query: Tensor,
    latents: Tensor,
    span: Span,
    scale: float,
    keys_of: Callable[[Tensor, Tensor], Tensor],
    values_of: Callable[[Tensor], Tensor],
    values_of_means: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Causal attention of the newest tokens of some requests over keys and values that latents of theirs make.

    A value is linear in its token's latents, so the mean of values is the value of the mean of latents. Where few
    tokens are new, that saves the values of all others.

    Args:
        query: [B·T, H, d], the T newest tokens of each of B requests, one request after another.
        latents: [B, S, r] of their first S tokens, the new ones included.
        span: the requests.
        scale: of the scores.
        keys_of: from latents [B, S, r] of the first S tokens and their positions [B·S] to keys [B, G, S, d].
        values_of: from the latents to values [B, G, S, d].
        values_of_means: from the means of latents of every query head [B·T, H, r] to [B·T, H, d]; None: of several
            blocks of latents.

    Returns:
        [B·T, H, d].
    """
    latents = latents[:, : span.longest]
    keys = keys_of(latents, span.positions())
    groups, width, heads = keys.shape[1], keys.shape[3], span.new * query.shape[1]
    # Products of a token: of its latents with all weights, or of its values with all weights and for themselves.
    if values_of_means is not None and heads * latents.shape[2] <= groups * width * latents.shape[2] + heads * width:
        return values_of_means(causal(query, keys, latents.unsqueeze(1), span, scale))
    return causal(query, keys, values_of(latents), span, scale)


def gathered(cache: Tensor, pages: Tensor) -> Tensor:
    """Vectors of pages [B, ·] of a cache [pages, tokens of a page, …]: [B, S, …]."""
    # Several times faster than indexing by a matrix, on a CPU.
    return cache.index_select(0, pages.flatten()).view(len(pages), -1, *cache.shape[2:])


def causal(query: Tensor, keys: Tensor, values: Tensor, span: Span, scale: float) -> Tensor:
    """Newest queries of requests over the keys and values of all their tokens.

    Args:
        query: [B·T, H, w].
        keys: [B, G, S, w] of S tokens, the longest request's or more; what is behind a request's own is not seen.
        values: [B, G or 1, S, v].
        span: the requests.
        scale: of the scores.

    Returns:
        [B·T, H, v].
    """
    query = by_key(query * scale, keys.shape[:2])
    batch, groups, new, heads, _ = query.shape
    tile = min(max(SCORES // (batch * groups * heads * span.longest), 1), new)
    hidden = span.hidden(keys.shape[2], tile)
    out = []
    for first in range(0, new, tile):
        rows, ahead = query[:, :, first : first + tile], first - new
        end = min(span.longest + ahead + rows.shape[2] + KEY_STEP - 1, keys.shape[2])
        end -= end % KEY_STEP if end < keys.shape[2] else 0
        if batch > 1:  # PyTorch would copy a part of every request's keys, which takes longer than to read all
            end = keys.shape[2]
        unseen = hidden[:, : rows.shape[2], : end - span.shortest - ahead - 1]
        out.append(mixed(rows, keys[:, :, :end], values[:, :, :end], unseen))
    return joined(out)


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


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrices [B, G, ·, ·] times matrices.

    One alone is no batch: of few rows, in bfloat16, that takes PyTorch four times as long on a CPU.
    """
    if a.shape[:2] == (1, 1):
        return (a[0, 0] @ b[0, 0])[None, None]
    return a @ b


def joined(tiles: list[Tensor]) -> Tensor:
    """Tiles [B, t, G, h, v] → [B·T, H, v]."""
    out = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)
    return out.flatten(2, 3).flatten(0, 1)


def paged_head_attention(
    query: Tensor, cache: Tensor, span: Span, scale: float, sinks: int, recent: int | None
) -> Tensor:
    """Causal attention of the newest tokens of some requests over their keys and values.

    Args:
        query: [B·T, H, d], the T newest tokens of each of B requests, one request after another.
        cache: [pages, G, tokens of a page, 2d], keys and values behind them; the new tokens' are in it.
        span: the requests; pages that no query sees may be any.
        scale: of the scores.
        sinks: first tokens that every query sees.
        recent: last tokens that a query sees, its own among them; None: all.

    Returns:
        [B·T, H, d].
    """
    if recent is None:
        return causal(query, *gathered_heads(cache, span.pages, query.dtype), span, scale)
    queries = by_key(query * scale, (len(span.pages), cache.shape[1])).split(QUERY_TILE, 2)
    windows = span.windows(sinks, recent, QUERY_TILE)
    return joined(
        [
            mixed(tile, *gathered_heads(cache, pages, query.dtype), hidden)
            for tile, (pages, hidden) in zip(queries, windows, strict=True)
        ]
    )


def gathered_heads(cache: Tensor, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B, G, S, d] of pages [B, ·] of a cache [pages, G, tokens of a page, 2d]."""
    entries = cache.index_select(0, pages.flatten()).unflatten(0, pages.shape)
    return entries.transpose(1, 2).flatten(2, 3).to(dtype).chunk(2, dim=-1)
