"""Rows that hold several documents one after the other, as packed training makes them.

transformers reads the documents off `position_ids` that start again, where there is no cache, and makes a mask of them.
A cache in another form than plain tensors has rules of its own (windows, first tokens, groups that share a scale), so
attention reads each document of such a model apart, as if it were alone.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .cache_layer import Call, keeps_cache

VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments by which kernels for rows of any lengths learn of documents."""

Spans = list[list[slice]]
"""Tokens of each document, of each row; one list that holds for all rows where their positions are the same."""


def take_documents(decoder: nn.Module, call: Call) -> Spans | None:
    """Return the documents that the rows of a call hold; None where each holds one.

    Who knows them without a look at the device says so by `documents`, beside `position_ids` that start again.
    Changes the call: documents that FlashAttention's arguments tell (`cu_seq_lens_q`, `seq_idx`) become `position_ids`,
    and a mask of ones, which hides nothing and keeps transformers from masking documents, is dropped.

    Raises:
        ValueError: a call whose documents cannot be kept apart.
    """
    tokens = new_tokens(call)
    rows, length = tokens.shape[:2]
    if length == 1:
        return None
    if (documents := call.pop("documents", None)) is not None:
        if call.get("attention_mask") is not None or keeps_cache(decoder, call):
            raise ValueError("several documents a row: pass use_cache=False, and no attention mask")
        return [list(row) for row in documents]
    row_starts = _told_starts(call, rows, length, tokens.device)
    if row_starts is not None and call.get("position_ids") is None:
        call["position_ids"] = _positions(row_starts)
    positions = _text_positions(call.get("position_ids"))
    if positions is None or isinstance(positions, FakeTensor):  # which has a shape alone, as in estimates of memory
        return None
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=-1) != 1
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        real = mask[:, -length:].bool()
        starts = starts & real
        starts[:, 1:] &= real[:, :-1]  # the first token after padding follows no document
    elif mask is not None:
        return None  # the caller's own mask
    if row_starts is not None and not torch.equal(row_starts, starts.expand_as(row_starts)):
        raise ValueError("position_ids start again elsewhere than cu_seq_lens_q or seq_idx says: pass one of them")
    if not starts[:, 1:].any():
        return None
    if mask is not None:
        if not mask.all():
            raise ValueError(
                "a row holds several documents and padding: pass position_ids that start again, and no attention mask"
            )
        call["attention_mask"] = None
    if keeps_cache(decoder, call):
        raise ValueError(
            "position_ids start again within a row, and a cache cannot keep several documents of a row apart: "
            "pass use_cache=False, or one document a row"
        )
    return [_spans(row) for row in starts.cpu()]


def new_tokens(call: Call) -> Tensor:
    """The tokens [B, T] of a call, or their embeddings [B, T, D]."""
    return call["input_ids"] if call.get("inputs_embeds") is None else call["inputs_embeds"]


def _told_starts(call: Call, rows: int, length: int, device: torch.device) -> Tensor | None:
    """First tokens of documents, bool [B, T], as the arguments of varlen kernels tell them; None where none do."""
    if (number := call.get("seq_idx")) is not None:
        starts = torch.ones(rows, length, dtype=torch.bool, device=device)
        starts[:, 1:] = number.diff(dim=-1) != 0
        return starts
    if (ends := call.get("cu_seq_lens_q")) is None:
        return None
    if ends[-1] != rows * length:
        raise ValueError(f"cu_seq_lens_q ends at {int(ends[-1])}, and the call has {rows * length} tokens")
    starts = torch.zeros(rows * length, dtype=torch.bool, device=device)
    starts[ends[:-1].long()] = True
    starts = starts.view(rows, length)
    starts[:, 0] = True
    return starts


def _positions(starts: Tensor) -> Tensor:
    """Positions [B, T] that start again at the first token of each document."""
    index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return index - torch.where(starts, index, 0).cummax(dim=-1).values


def _text_positions(positions: Tensor | None) -> Tensor | None:
    """The positions [B, T] of which transformers makes masks, among those of several axes."""
    if positions is None or positions.ndim == 2:
        return positions
    return positions[0] if positions.shape[0] == 4 else None


def _spans(starts: Tensor) -> list[slice]:
    first = starts.nonzero()[:, 0].tolist()
    return [slice(*span) for span in zip(first, [*first[1:], len(starts)], strict=True)]


__all__ = ["VARLEN", "Spans", "new_tokens", "take_documents"]
