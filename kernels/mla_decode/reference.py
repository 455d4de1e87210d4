"""PyTorch reference of MLA decode attention.

Multi-head latent attention with the up-projections absorbed into queries and outputs (DeepSeek-V2, arXiv 2405.04434,
section 2.1 and appendix C): all query heads share one key, ``[latent ; rotated key]``, and one value, the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.reference import all_rows, attention, paged_tokens, visible


def causal_mask(tokens: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the boolean mask [tokens, length] of the keys that each of the last ``tokens`` positions sees."""
    query_position = torch.arange(length - tokens, length, device=device)[:, None]
    key_position = torch.arange(length, device=device)[None]
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
) -> tuple[Tensor, Tensor]:
    """Compute `mla_decode` in fp32, or in float64 for float64 inputs; arguments as in `operator.py`.

    Returns:
        out [B, T, H, r] in the query's dtype, and lse [B, T, H], fp32 or float64.
    """
    if pages is not None:
        latent, rope_key = paged_tokens(latent, pages), paged_tokens(rope_key, pages)
        key_gain = None if key_gain is None else paged_tokens(key_gain, pages)
    rows, capacity = latent.shape[:2]
    ends = all_rows(capacity, rows, query.device) if lengths is None else lengths.clamp(max=capacity)
    filled = torch.arange(capacity, device=query.device) < ends[:, None]
    mask = visible(filled, ends, starts, query.shape[1])
    return shared_attention(query, latent, rope_key, scale, mask, key_gain)


def shared_attention(
    query: Tensor, latent: Tensor, rope_key: Tensor, scale: float, mask: Tensor, key_gain: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute attention under a mask [B, T, S] with one key and value for all heads: [B, T, H, r] and lse [B, T, H]."""
    key, value = torch.cat([latent, rope_key], dim=-1)[:, None], latent[:, None]
    return attention(query, key, value, scale, mask, key_gain)
