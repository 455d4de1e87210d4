"""Grouped-query attention of a few new tokens over a cache, in plain PyTorch: what the kernel must reproduce.

Ainslie et al., "GQA", arXiv 2305.13245: query head h reads KV head h // (H / G). G = H is multi-head attention, G = 1
multi-query attention. Computed in float32 at least, whatever the inputs are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the last T of each row's tokens over all that they may see; arguments as of `gqa_decode`.

    Returns:
        out [B, T, H, v] in the query's dtype and lse [B, T, H] in float32, of float64 queries in float64.
    """
    if pages is not None:
        key, value = paged_tokens(key, pages), paged_tokens(value, pages)
    rows, tokens, capacity = query.shape[0], query.shape[1], key.shape[2]
    ends = all_rows(capacity, rows, query.device) if lengths is None else lengths
    filled = torch.arange(capacity, device=query.device) < ends[:, None]
    return attention(query, key, value, scale, visible(filled, ends, starts, tokens, window))


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor, gain: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention under a mask.

    Args:
        query: [B, T, H, d]
        key: [B, G, S, d]
        value: [B, G, S, v]
        scale: multiplies the logits.
        mask: boolean [B, T, S], or [B, G, T, S] by KV head. What no query sees may be NaN.
        gain: [B, S, n], factors on the logits of the H / n query heads of each.
    """
    mask = mask if mask.dim() == 4 else mask[:, None]
    if not key.shape[2]:  # a maximum of nothing is none; one token that nobody sees changes nothing
        key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        mask, gain = F.pad(mask, (0, 1)), None
    wide = torch.promote_types(query.dtype, torch.float32)
    anyone = mask.any(dim=2)[..., None]
    key, value = (tensor.to(wide).masked_fill(~anyone, 0.0) for tensor in (key, value))
    grouped = query.to(wide).unflatten(2, (key.shape[1], -1))
    logits = torch.einsum("btgrd,bgsd->btgrs", grouped, key) * scale
    if gain is not None:
        gain = gain.to(wide).masked_fill(~mask.any(dim=(1, 2))[..., None], 0.0)
        each = gain.repeat_interleave(query.shape[2] // gain.shape[-1], dim=-1).mT
        logits = logits * each.unflatten(1, grouped.shape[2:4])[:, None]
    logits = logits.masked_fill(~mask.transpose(1, 2)[:, :, :, None], -torch.inf)
    # The gradients of softmax and logsumexp are NaN where there is nothing to see; these are not.
    max_logit = logits.detach().amax(dim=-1, keepdim=True)
    weights = (logits - torch.where(max_logit.isfinite(), max_logit, 0.0)).exp()
    sum_exp = weights.sum(dim=-1, keepdim=True)
    some = sum_exp > 0
    safe = torch.where(some, sum_exp, 1.0)
    out = torch.einsum("btgrs,bgsv->btgrv", weights / safe, value)
    lse = torch.where(some, safe.log() + max_logit, -torch.inf)
    return out.flatten(2, 3).to(query.dtype), lse.squeeze(-1).flatten(2, 3)


def visible(filled: Tensor, ends: Tensor, starts: Tensor | None, tokens: int, window: int | None) -> Tensor:
    """Boolean [B, T, S]: which tokens the last T of each row see.

    Args:
        filled: boolean [B, S], tokens that are there at all.
        ends: [B], tokens of each row: query t stands at `ends - T + t`.
        starts: [B], the first token of each row that is no padding; None is 0.
        tokens: T.
        window: latest tokens that a query sees, itself included; None for all.
    """
    token = torch.arange(filled.shape[1], device=filled.device)
    position = (ends[:, None] - tokens + torch.arange(tokens, device=filled.device))[:, :, None]
    mask = filled[:, None] & (token <= position)
    if starts is not None:
        mask = mask & (token >= starts[:, None, None])
    return mask if window is None else mask & (token > position - window)


def paged_tokens(pool: Tensor, pages: Tensor) -> Tensor:
    """Pages [P, G, page, ·] and each row's page numbers [B, n] → the rows' tokens [B, G, n·page, ·]; G may be lacking.

    Numbers of pages that a row does not use may be anything; they are read as page 0 or the last one.
    """
    entries = pool[pages.long().clamp(0, pool.shape[0] - 1)]
    return entries.movedim(1, -3).flatten(-3, -2)


def all_rows(tokens: int, rows: int, device: torch.device) -> Tensor:
    """Return the same length for every row, int32 [B]."""
    return torch.full((rows,), tokens, dtype=torch.int32, device=device)
