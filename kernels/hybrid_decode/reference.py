"""PyTorch reference of decode attention over full and streaming heads.

Full heads keep all tokens; streaming heads keep the first few, the sinks, and a window (Xiao et al., DuoAttention,
arXiv:2410.10819).

Shapes: B rows, T new tokens, H query heads, Gf full and Gs streaming KV heads, S tokens of the full heads, K slots of
the streaming heads, head sizes d of keys and v of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.reference import attention


def hybrid_attention(
    query: Tensor,
    full_key: Tensor,
    full_value: Tensor,
    streaming_key: Tensor,
    streaming_value: Tensor,
    scale: float,
    sink_slots: int,
    sinks: int,
    recent: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `operator.hybrid_decode` in at least fp32, with the same arguments and results."""
    rows, tokens = query.shape[:2]
    full_heads, capacity = full_key.shape[1:3]
    slots = streaming_key.shape[2]
    if lengths is None:
        lengths = torch.full((rows,), capacity, device=query.device)
    if starts is None:
        starts = torch.zeros_like(lengths)
    lengths, starts = lengths.long()[:, None], starts.long()[:, None]
    own = lengths - tokens + torch.arange(tokens, device=query.device)
    positions = torch.arange(capacity, device=query.device).expand(rows, -1)
    of_full = visible(own, positions, starts, 0, None)
    slot = torch.arange(slots, device=query.device)
    window_start = lengths - (slots - sink_slots)
    positions = torch.where(slot < sink_slots, starts + slot, window_start + slot - sink_slots)
    filled = (slot >= sink_slots) | (positions < window_start)
    of_streaming = visible(own, positions, starts, sinks, recent) & filled[:, None]

    size = query.shape[2] // (full_heads + streaming_key.shape[1])
    split = full_heads * size
    kinds = (
        (query[:, :, :split], full_key, full_value, scale, of_full),
        (query[:, :, split:], streaming_key, streaming_value, scale, of_streaming),
    )
    outs, logs = zip(*(attention(*kind) for kind in kinds if kind[1].shape[1]), strict=True)
    return torch.cat(outs, dim=2), torch.cat(logs, dim=2)


def visible(own: Tensor, positions: Tensor, starts: Tensor, sinks: int | Tensor, recent: int | Tensor | None) -> Tensor:
    """Return the boolean mask [B, T, S]: each query sees itself and, from its row's start, sinks and recent tokens.

    A padding query sees only itself.

    Args:
        own: positions of the queries [B, T].
        positions: positions of the keys [B, S].
        starts: first position of each row that is no padding [B, 1].
        sinks, recent: number of first and latest visible tokens; all if `recent` is None.
    """
    own, positions, starts = own[:, :, None], positions[:, None], starts[:, None]
    mask = (positions >= starts) & (positions <= own)
    if recent is not None:
        mask &= (own - positions < recent) | (positions - starts < sinks)
    return (mask | (positions == own)) & (positions >= 0)
