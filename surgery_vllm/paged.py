"""Attention over paged latents, or paged keys and values, in plain PyTorch.

Two matrix products and a softmax per tile of queries, with the query heads that share a key as rows of one matrix, and
a mask only after the first new token. Scores have the dtype of the queries, as in transformers' eager attention. In
bfloat16, SmolLM2 in transformers was as close to float32 with eager as with fused attention (KL 1.31e-3 each). Keys and
values in float32 on a CPU use PyTorch's fused attention instead.

Prompts are scored against latents as well. Rebuilding keys and values of all heads first saves operations only if the
latent is much wider than a head; at 68 + 28 elements and nine heads of 64 it took 1.2 to 1.7 times as long on a CPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from surgery_vllm.spans import Span

# Most bytes of scores at a time, of all heads, so that they stay in the CPU's cache.
SCORES = 2**23
# The number of keys of a tile is rounded up to a multiple, for few shapes of products, which libraries set up once.
KEY_STEP = 64
# Queries per tile over sinks and a window; each tile gathers the pages that its queries see.
QUERY_TILE = 128


def write_slots(cache: Tensor, vectors: Tensor, slots: Tensor) -> None:
    """Write vectors [T, …] to slots [T] of a cache [pages, tokens of a page, …]; negative slots are padding.

    Vectors beyond the slots are padding too. Padding rewrites the content of slot 0, in vLLM's null block, which
    belongs to no request; dropping it would make the host wait for a count.
    """
    padding = (slots < 0).view(-1, *[1] * (vectors.dim() - 1))
    slots, vectors = slots.clamp(min=0), vectors[: len(slots)].to(cache.dtype)
    cache[slots // cache.shape[1], slots % cache.shape[1]] = torch.where(padding, cache[0, 0], vectors)


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Read the vectors [T, …] at slots [T] of a cache [pages, tokens of a page, …]; arbitrary for padding."""
    slots = slots.clamp(min=0)
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def latent_attention(query: Tensor, vectors: Tensor, span: Span, rank: int, scale: float) -> Tensor:
    """Compute causal attention of the new tokens of a span's requests over the latents of all their tokens.

    Args:
        query: [B·T, H, r + ρ], queries in latent space of the T new tokens of each of B requests, request by request.
        vectors: [B, S, r + ρ (+ G)], latents, rotated keys and gains of the first S tokens, new ones included;
            arbitrary after the end of a request. Gains scale the scores, one per group of adjacent heads.
        span: the requests.
        rank: r.
        scale: attention scale.

    Returns:
        [B·T, H, r], the attention-weighted latents.
    """
    vectors = vectors.unsqueeze(1)  # [B, 1, S, r + ρ (+ G)]
    keys, gains = vectors.tensor_split([query.shape[-1]], dim=-1)
    if gains.shape[-1]:
        keys = keys * gains.transpose(1, 3)  # [B, G, S, r + ρ]
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
    """Compute causal attention of the new tokens of a span's requests over keys and values rebuilt from latents.

    Values are linear in the latents, so the weighted mean of values is the value of the weighted mean of latents. With
    few new tokens that saves rebuilding the values of all tokens.

    Args:
        query: [B·T, H, d], queries of the T new tokens of each of B requests, request by request.
        latents: [B, S, r], latents of the first S tokens, new ones included.
        span: the requests.
        scale: attention scale.
        keys_of: rebuilds keys [B, G, S, d] from latents [B, S, r] and their positions [B·S].
        values_of: rebuilds values [B, G, S, d] from the latents.
        values_of_means: maps weighted latents per query head [B·T, H, r] to outputs [B·T, H, d]; None if the layer has
            several blocks.

    Returns:
        [B·T, H, d].
    """
    latents = latents[:, : span.longest]
    keys = keys_of(latents, span.positions())
    groups, width, heads = keys.shape[1], keys.shape[3], span.new * query.shape[1]
    # Operations per token: weighting latents for all heads, or weighting values plus rebuilding them.
    if values_of_means is not None and heads * latents.shape[2] <= groups * width * latents.shape[2] + heads * width:
        return values_of_means(causal(query, keys, latents.unsqueeze(1), span, scale))
    return causal(query, keys, values_of(latents), span, scale)


def gathered(cache: Tensor, pages: Tensor) -> Tensor:
    """Gather the vectors [B, S, …] of pages [B, ·] from a cache [pages, tokens of a page, …]."""
    # Several times faster than indexing by a matrix, on a CPU.
    return cache.index_select(0, pages.flatten()).view(len(pages), -1, *cache.shape[2:])


def causal(query: Tensor, keys: Tensor, values: Tensor, span: Span, scale: float) -> Tensor:
    """Compute causal attention of new queries over the keys and values of all tokens of their requests.

    Args:
        query: [B·T, H, w].
        keys: [B, G, S, w], S at least the longest request's tokens; keys after the end of a request are masked.
        values: [B, G or 1, S, v].
        span: the requests.
        scale: attention scale.

    Returns:
        [B·T, H, v].
    """
    if keys.shape == values.shape and keys.dtype == torch.float32 and keys.device.type == "cpu":
        return fused(query, keys, values, span, scale)
    query = by_key(query * scale, keys.shape[:2])
    batch, groups, new, heads, _ = query.shape
    tile = min(max(SCORES // (batch * groups * heads * span.longest * query.itemsize), 1), new)
    hidden = span.hidden(keys.shape[2], tile)
    out = []
    for first in range(0, new, tile):
        rows, ahead = query[:, :, first : first + tile], first - new
        end = min(span.longest + ahead + rows.shape[2] + KEY_STEP - 1, keys.shape[2])
        end -= end % KEY_STEP if end < keys.shape[2] else 0
        if batch > 1:  # a slice of several requests' keys would be copied, which is slower than reading all
            end = keys.shape[2]
        unseen = hidden[:, : rows.shape[2], : end - span.shortest - ahead - 1]
        out.append(mixed(rows, keys[:, :, :end], values[:, :, :end], unseen))
    return joined(out)


def fused(query: Tensor, keys: Tensor, values: Tensor, span: Span, scale: float) -> Tensor:
    """Compute `causal` for values as wide as keys by PyTorch's fused attention, a tile of queries at a time.

    On a CPU it takes half the time of matrix products in float32, and up to three times as long in bfloat16.
    """
    query = query.unflatten(0, (len(span.pages), -1)).transpose(1, 2)
    is_prompt = span.shortest == span.longest == span.new
    tile, out = span.new if is_prompt else QUERY_TILE, []
    for first in range(0, span.new, tile):
        rows = query[:, :, first : first + tile]
        end = span.longest - span.new + first + rows.shape[2]
        mask = None if is_prompt else span.visible(first, rows.shape[2])[..., :end]
        settings = {"attn_mask": mask, "is_causal": is_prompt, "scale": scale, "enable_gqa": True}
        out.append(scaled_dot_product_attention(rows, keys[:, :, :end], values[:, :, :end], **settings))
    return (out[0] if len(out) == 1 else torch.cat(out, dim=2)).transpose(1, 2).flatten(0, 1)


def by_key(query: Tensor, requests_and_groups: tuple[int, int]) -> Tensor:
    """Reshape queries [B·T, H, w] to [B, G, T, H/G, w]: one matrix per KV head."""
    requests, groups = requests_and_groups
    return query.view(requests, -1, groups, query.shape[1] // groups, query.shape[2]).transpose(1, 2).contiguous()


def mixed(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Attend scaled queries [B, G, t, h, w] to keys [B, G, S, w] and values [B, G or 1, S, v] → [B, t, G, h, v].

    ``hidden`` [B, t, U] is true for those of the last U keys that a query does not see.
    """
    batch, groups, tile, heads, _ = query.shape
    scores = product(query.flatten(2, 3), keys.mT)
    last = scores.view(batch, groups, tile, heads, -1)[..., keys.shape[2] - hidden.shape[2] :]
    last.masked_fill_(hidden[:, None, :, None], -torch.inf)
    weights = scores.softmax(-1).view(batch, values.shape[1], -1, keys.shape[2])
    return product(weights, values).view(batch, groups, tile, heads, -1).transpose(1, 2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices [B, G, ·, ·], a single pair without a batch dimension.

    A batched product of few rows in bfloat16 takes PyTorch four times as long on a CPU.
    """
    if a.shape[:2] == (1, 1):
        return (a[0, 0] @ b[0, 0])[None, None]
    return a @ b


def joined(tiles: list[Tensor]) -> Tensor:
    """Concatenate tiles [B, t, G, h, v] to [B·T, H, v]."""
    out = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)
    return out.flatten(2, 3).flatten(0, 1)


def paged_head_attention(
    query: Tensor, cache: Tensor, span: Span, scale: float, sinks: int, recent: int | None
) -> Tensor:
    """Compute causal attention of the new tokens of a span's requests over paged keys and values.

    Args:
        query: [B·T, H, d], queries of the T new tokens of each of B requests, request by request.
        cache: [pages, G, tokens of a page, 2d], keys followed by values, new tokens included.
        span: the requests; pages that no query sees may be arbitrary.
        scale: attention scale.
        sinks: first tokens that every query sees.
        recent: last tokens that a query sees, its own included; None for all.

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
    """Gather keys and values [B, G, S, d] of pages [B, ·] from a cache [pages, G, tokens of a page, 2d]."""
    entries = cache.index_select(0, pages.flatten()).unflatten(0, pages.shape)
    return entries.transpose(1, 2).flatten(2, 3).to(dtype).chunk(2, dim=-1)
