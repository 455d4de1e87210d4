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
