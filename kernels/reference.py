"""Grouped-query attention in PyTorch, which the references of all operations share.

Ainslie et al., "GQA", arXiv 2305.13245: query head h reads KV head h // (H / G). G = H is multi-head attention, G = 1
multi-query attention. Computed in at least float32 for all input dtypes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor, gain: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute grouped-query attention under a mask, in at least float32.

    Query [B, T, H, d], key [B, G, S, d], value [B, G, S, v]; the boolean mask is [B, T, S], or [B, G, T, S] by KV head.
    Tokens that no query sees may be NaN. A gain [B, S, n] multiplies the logits of H / n query heads each. Returns out
    [B, T, H, v] in the query's dtype and lse [B, T, H].
    """
    mask = mask if mask.dim() == 4 else mask[:, None]
    if not key.shape[2]:  # `amax` fails without tokens, so add a masked one
        key, value = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        mask, gain = F.pad(mask, (0, 1)), None
    wide = torch.promote_types(query.dtype, torch.float32)
    is_visible = mask.any(dim=2)[..., None]
    key, value = (tensor.to(wide).masked_fill(~is_visible, 0.0) for tensor in (key, value))
    grouped = query.to(wide).unflatten(2, (key.shape[1], -1))
    logits = torch.einsum("btgrd,bgsd->btgrs", grouped, key) * scale
    if gain is not None:
        gain = gain.to(wide).masked_fill(~mask.any(dim=(1, 2))[..., None], 0.0)
        each = gain.repeat_interleave(query.shape[2] // gain.shape[-1], dim=-1).mT
        logits = logits * each.unflatten(1, grouped.shape[2:4])[:, None]
    logits = logits.masked_fill(~mask.transpose(1, 2)[:, :, :, None], -torch.inf)
    # Explicit, since the gradients of softmax and logsumexp are NaN for a query without a visible token.
    max_logit = logits.detach().amax(dim=-1, keepdim=True)
    weights = (logits - torch.where(max_logit.isfinite(), max_logit, 0.0)).exp()
    sum_exp = weights.sum(dim=-1, keepdim=True)
    has_visible = sum_exp > 0
    safe = torch.where(has_visible, sum_exp, 1.0)
    out = torch.einsum("btgrs,bgsv->btgrv", weights / safe, value)
    lse = torch.where(has_visible, safe.log() + max_logit, -torch.inf)
    return out.flatten(2, 3).to(query.dtype), lse.squeeze(-1).flatten(2, 3)


def visible(filled: Tensor, ends: Tensor, starts: Tensor | None, tokens: int) -> Tensor:
    """Return the boolean mask [B, T, S] of the tokens that the last T tokens of each row see.

    Of ``filled`` slots [B, S]: query t is at position `ends - T + t`, the first token that is no padding at ``starts``
    (None for 0).
    """
    token = torch.arange(filled.shape[1], device=filled.device)
    position = (ends[:, None] - tokens + torch.arange(tokens, device=filled.device))[:, :, None]
    mask = filled[:, None] & (token <= position)
    if starts is not None:
        mask = mask & (token >= starts[:, None, None])
    return mask


def paged_tokens(pool: Tensor, pages: Tensor) -> Tensor:
    """Gather each row's tokens [B, G, n·page, ·] from pages [P, G, page, ·] and a page table [B, n]; G is optional.

    Unused entries of the page table may hold any number; they are clamped to valid pages.
    """
    entries = pool[pages.long().clamp(0, pool.shape[0] - 1)]
    return entries.movedim(1, -3).flatten(-3, -2)


def all_rows(tokens: int, rows: int, device: torch.device) -> Tensor:
    """Return the same length for every row, int32 [B]."""
    return torch.full((rows,), tokens, dtype=torch.int32, device=device)
