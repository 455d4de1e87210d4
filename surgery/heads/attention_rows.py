"""Rows of attention matrices, for scores that ask where chosen queries look: never a whole matrix of T x S."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import LongTensor, Tensor

from surgery.running.attention_tap import AttentionCall

ENTRIES = 1 << 24
"""Attention weights at a time: 64 MB."""


def row_pieces(call: AttentionCall, rows: LongTensor) -> Iterator[LongTensor]:
    """Cuts rows [n] into pieces whose attention, over all keys and heads, has about `ENTRIES` weights."""
    batch, heads = call.query.shape[:2]
    return iter(rows.split(max(1, ENTRIES // (batch * heads * call.key.shape[2]))))


def attention_rows(call: AttentionCall, rows: LongTensor, keys: LongTensor | None = None) -> Tensor:
    """Attention of some queries.

    Args:
        rows: [n] int64, places of the queries among the call's T.
        keys: [m] int64, places of keys; the softmax is over these alone. None for all S.

    Returns:
        [B, H, n, m] float32; a row and a learned sink sum to 1, or 0 if its query sees none of the keys.
    """
    rows = rows.to(call.query.device)
    key, query = call.key, call.query[:, :, rows]
    places = torch.arange(key.shape[2], device=key.device)
    if keys is not None:
        places = keys.to(key.device)
        key = key[:, :, places]
    batch, heads, count, width = query.shape
    query = query.reshape(batch, call.kv_heads, -1, width)  # query heads of one KV head stand together
    scores = (query.float() @ key.float().transpose(-1, -2)).view(batch, heads, count, -1)
    if call.mask is None:
        mask = (places <= rows[:, None] + call.key.shape[2] - call.query.shape[2])[None, None]
    else:
        mask = call.mask[:, :, rows][..., places]
    scores = call.softmax.logits(scores).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return call.softmax.normalized(scores).masked_fill_(~mask, 0)  # also of queries that see none of the keys
