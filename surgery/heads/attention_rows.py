"""Rows of attention matrices for selected queries, without the whole T x S matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import LongTensor, Tensor

from surgery.running.attention_tap import AttentionCall

ENTRIES = 1 << 24
"""Attention weights computed at a time, 64 MB in float32."""


def row_pieces(call: AttentionCall, rows: LongTensor) -> Iterator[LongTensor]:
    """Split query rows [n] into pieces of about `ENTRIES` attention weights over all keys and heads."""
    batch, heads = call.query.shape[:2]
    return iter(rows.split(max(1, ENTRIES // (batch * heads * call.key.shape[2]))))


def attention_rows(call: AttentionCall, rows: LongTensor, keys: LongTensor | None = None) -> Tensor:
    """Compute the attention weights [B, H, n, m] float32 of selected queries, ``rows`` [n] of the call's T.

    The softmax is over ``keys`` [m], or all S, alone. A row and its learned sink sum to 1, or to 0 if all are masked.
    """
    rows = rows.to(call.query.device)
    key, query = call.key, call.query[:, :, rows]
    key_positions = torch.arange(key.shape[2], device=key.device)
    if keys is not None:
        key_positions = keys.to(key.device)
        key = key[:, :, key_positions]
    batch, heads, count, width = query.shape
    query = query.reshape(batch, call.kv_heads, -1, width)  # query heads of a KV head are adjacent
    scores = (query.float() @ key.float().transpose(-1, -2)).view(batch, heads, count, -1)
    if call.mask is None:
        mask = (key_positions <= rows[:, None] + call.key.shape[2] - call.query.shape[2])[None, None]
    else:
        mask = call.mask[:, :, rows][..., key_positions]
    scores = call.softmax.logits(scores).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return call.softmax.normalized(scores).masked_fill_(~mask, 0)  # fully masked rows too
