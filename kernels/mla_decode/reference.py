"""Latent attention in plain PyTorch: what every kernel of this operation must reproduce.

Multi-head latent attention with the up-projections absorbed into queries and outputs (DeepSeek-V2, arXiv 2405.04434,
section 2.1 and appendix C): all query heads share one key, ``[latent ; rotated key]``, and one value, the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor


def latent_attention(
    query: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    scale: float,
    *,
    key_gain: Tensor | None = None,
    window: int | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of the last T queries over S cached tokens.

    Args:
        query: [B, T, H, r + ρ], the latent part first, the last ρ already rotated.
        latent: [B, S, r], key and value of every head.
        rope_key: [B, S, ρ], rotated.
        scale: multiplies the logits.
        key_gain: [B, S, G] factor on the logits of the H // G query heads of each group (an exact key norm).
        window: how many latest tokens a query sees, itself included; None for all.
        return_weights: also return the attention weights [B, H, T, S].

    Returns:
        [B, T, H, r], the attention-weighted latent of every head, in the dtype of ``query``.
    """
    tokens, total = query.shape[1], latent.shape[1]
    key = torch.cat([latent, rope_key], dim=-1)
    logits = torch.einsum("bthc,bsc->bhts", query, key) * scale
    if key_gain is not None:
        per_head = key_gain.repeat_interleave(query.shape[2] // key_gain.shape[-1], dim=-1)
        logits = logits * per_head.permute(0, 2, 1)[:, :, None]
    weights = logits.masked_fill(~causal_mask(tokens, total, window, query.device), -torch.inf).softmax(-1)
    mixed = torch.einsum("bhts,bsc->bthc", weights, latent)
    return (mixed, weights) if return_weights else mixed


def causal_mask(tokens: int, total: int, window: int | None, device: torch.device) -> Tensor:
    """Boolean [tokens, total]: which of ``total`` keys each of the last ``tokens`` positions may see."""
    query_position = torch.arange(total - tokens, total, device=device)[:, None]
    key_position = torch.arange(total, device=device)[None]
    visible = key_position <= query_position
    return visible if window is None else visible & (key_position > query_position - window)


def ragged_latent_attention(
    query: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    scale: float,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
    key_gain: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` (see `operator.py`, whose arguments these are) in fp32, or in float64 if that is the inputs' dtype.

    Returns:
        out [B, T, H, r] in the query's dtype, and lse [B, T, H], fp32 or float64.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    if pages is not None:
        latent, rope_key = gathered(latent, pages), gathered(rope_key, pages)
        key_gain = None if key_gain is None else gathered(key_gain, pages)
    batch, total = latent.shape[:2]
    lengths = torch.full((batch,), total, device=query.device) if lengths is None else lengths.clamp(max=total)
    visible = visible_tokens(query.shape[1], total, lengths, starts, window)
    # What nothing sees may be NaN, which a weight of 0 would not silence.
    hidden = ~visible.any(dim=1)[..., None]
    latent, rope_key = (part.to(wide).masked_fill(hidden, 0) for part in (latent, rope_key))
    key_gain = None if key_gain is None else key_gain.to(wide).masked_fill(hidden, 0)
    logits = latent_logits(query.to(wide), latent, rope_key, scale, key_gain)
    return attend(logits, visible, latent, query.dtype)


def latent_logits(
    query: Tensor, latent: Tensor, rope_key: Tensor, scale: float, key_gain: Tensor | None = None
) -> Tensor:
    """Scaled logits [B, T, H, S] of query [B, T, H, r + ρ] against every token."""
    logits = torch.einsum("bthc,bsc->bths", query, torch.cat([latent, rope_key], dim=-1)) * scale
    if key_gain is None:
        return logits
    return logits * key_gain.repeat_interleave(query.shape[2] // key_gain.shape[-1], dim=-1).mT[:, None]


def attend(logits: Tensor, visible: Tensor, latent: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """logits [B, T, H, S], visible [B, T, S], latent [B, S, r] → out [B, T, H, r] in `dtype` and lse [B, T, H].

    A query that sees nothing has out = 0 and lse = -∞.
    """
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    lse = logits.logsumexp(dim=-1)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("bths,bsc->bthc", weights, latent).to(dtype), lse


def visible_tokens(tokens: int, total: int, lengths: Tensor, starts: Tensor | None, window: int | None) -> Tensor:
    """Boolean [B, T, total]: which of a row's first `total` tokens its last T may see; `lengths` may be more."""
    key = torch.arange(total, device=lengths.device)
    query = lengths[:, None, None] - tokens + torch.arange(tokens, device=lengths.device)[None, :, None]
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    return visible if starts is None else visible & (key >= starts[:, None, None])


def gathered(paged: Tensor, pages: Tensor) -> Tensor:
    """Pages [P, page, n] in the order of `pages` [B, m]: [B, m · page, n]. Numbers of no page, unused, are clamped."""
    return paged[pages.long().clamp(0, paged.shape[0] - 1)].flatten(1, 2)
