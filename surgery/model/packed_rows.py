"""Packed rows: several documents one after the other in a batch row, as in packed training.

Without a cache, transformers detects the documents by `position_ids` that restart, and masks attention between them.
Windows, sinks and groups of quantized tokens count from the start of a document, so models with such a cache run
attention on each document separately.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .cache_layer import Call, keeps_cache

VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that pass document boundaries to varlen kernels."""

Spans = list[list[slice]]
"""Token ranges of the documents of each row; a single list if all rows have the same positions."""


def take_documents(decoder: nn.Module, call: Call) -> Spans | None:
    """Return the documents in the rows of a call; None if every row holds one.

    Modifies the call: FlashAttention's `cu_seq_lens_q` or `seq_idx` become `position_ids`. A mask of ones is dropped,
    since it would keep transformers from masking documents.

    Raises:
        ValueError: the documents of the call cannot be separated.
    """
    tokens = new_tokens(call)
    rows, length = tokens.shape[:2]
    if length == 1:
        return None
    row_starts = _document_starts(call, rows, length, tokens.device)
    if row_starts is not None and call.get("position_ids") is None:
        call["position_ids"] = _positions(row_starts)
    positions = _text_positions(call.get("position_ids"))
    if positions is None or isinstance(positions, FakeTensor):  # no values, as in estimates of memory
        return None
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=-1) != 1
    mask = call.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        real = mask[:, -length:].bool()
        starts = starts & real
        starts[:, 1:] &= real[:, :-1]  # the first token after padding starts no further document
    elif mask is not None:
        return None  # the caller's own mask
    if row_starts is not None and not torch.equal(row_starts, starts.expand_as(row_starts)):
        raise ValueError("position_ids and cu_seq_lens_q or seq_idx mark different documents; pass one of them")
    if not starts[:, 1:].any():
        return None
    if mask is not None:
        if not mask.all():
            raise ValueError("packed documents with padding are not supported; pass position_ids and no attention mask")
        call["attention_mask"] = None
    if keeps_cache(decoder, call):
        raise ValueError(
            "position_ids restart within a row, and packed documents cannot be cached; "
            "pass use_cache=False, or one document per row"
        )
    return [_spans(row) for row in starts.cpu()]


def new_tokens(call: Call) -> Tensor:
    """Return the input tokens [B, T] of a call, or their embeddings [B, T, D]."""
    return call["input_ids"] if call.get("inputs_embeds") is None else call["inputs_embeds"]


def _document_starts(call: Call, rows: int, length: int, device: torch.device) -> Tensor | None:
    """Return the first tokens of documents, bool [B, T], from the arguments of varlen kernels; None without them."""
    if (number := call.get("seq_idx")) is not None:
        starts = torch.ones(rows, length, dtype=torch.bool, device=device)
        starts[:, 1:] = number.diff(dim=-1) != 0
        return starts
    if (ends := call.get("cu_seq_lens_q")) is None:
        return None
    if ends[-1] != rows * length:
        raise ValueError(f"cu_seq_lens_q ends at {int(ends[-1])}, but the call has {rows * length} tokens")
    starts = torch.zeros(rows * length, dtype=torch.bool, device=device)
    starts[ends[:-1].long()] = True
    starts = starts.view(rows, length)
    starts[:, 0] = True
    return starts


def _positions(starts: Tensor) -> Tensor:
    """Return positions [B, T] that restart at the first token of each document."""
    index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return index - torch.where(starts, index, 0).cummax(dim=-1).values


def _text_positions(positions: Tensor | None) -> Tensor | None:
    """Return the positions [B, T] that transformers builds masks from; None if positions have axes only."""
    if positions is None or positions.ndim == 2:
        return positions
    return positions[0] if positions.shape[0] == 4 else None


def _spans(starts: Tensor) -> list[slice]:
    first = starts.nonzero()[:, 0].tolist()
    return [slice(*span) for span in zip(first, [*first[1:], len(starts)], strict=True)]
