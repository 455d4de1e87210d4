"""PyTorch reference of prefill attention with sinks and a window per head.

A full head has a window of all tokens (Xiao et al., DuoAttention, arXiv:2410.10819).
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.gqa_decode.reference import attention

QUERIES = 256
"""Queries per chunk, to bound the memory of the logits."""


def sink_recent_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sinks: Tensor,
    recent: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `operator.sink_recent_prefill` in at least fp32, with the same arguments and results."""
    tokens, positions = query.shape[2], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    if starts is None:
        starts = torch.zeros(len(query), dtype=torch.int32, device=query.device)
    own = torch.arange(positions - tokens, positions, device=query.device)
    # Tokens that no query sees may be NaN.
    used = torch.arange(positions, device=query.device) >= starts[:, None].clamp(max=positions - tokens)
    key, value = (torch.where(used[:, None, :, None], tensor.to(wide), 0.0) for tensor in (key, value))
    parts = [
        attention(queries.transpose(1, 2), key, value, scale, visible(places, positions, sinks, recent, starts))
        for queries, places in zip(query.split(QUERIES, dim=2), own.split(QUERIES), strict=True)
    ]
    outs, logs = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(logs, dim=1).transpose(1, 2).contiguous()


def visible(own: Tensor, positions: int, sinks: Tensor, recent: Tensor, starts: Tensor) -> Tensor:
    """Return the mask [B, G, T, S] of the keys that queries at positions `own` [T] see; arguments as the operator's."""
    own, place = own[:, None], torch.arange(positions, device=own.device)
    start, sinks, recent = starts[:, None, None, None], sinks[:, None, None], recent[:, None, None]
    near = (recent < 0) | (own - place < recent) | (place - start < sinks)
    return ((place >= start) & (place <= own) & near) | (place == own)
