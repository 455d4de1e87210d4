"""A few logits of a written checkpoint, put on record, so that anyone can see later that it still computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.running.layer_stream import LayerStream

TOKENS = 16
KEPT = 16
"""Logits on record, of ids spread over the vocabulary."""


def take_probe(stream: LayerStream, tokens: Tensor, hidden: Tensor, piece: int | None) -> dict[str, Any]:
    """The record, as plain values.

    Args:
        tokens: [T] that were read, of which the first are taken.
        hidden: [T, D] what the last layer put out for them, before the norm.
        piece: how many were read at a time, through a cache; None: all in one pass.
    """
    tokens = tokens[:TOKENS]
    logits = stream.logits(hidden[len(tokens) - 1].to(stream.device, stream.dtype)).float()
    ids = torch.linspace(0, len(logits) - 1, min(KEPT, len(logits))).long()
    return {
        "tokens": tokens.tolist(),
        "piece": piece,
        "dtype": str(stream.dtype).removeprefix("torch."),
        "ids": ids.tolist(),
        "logits": logits[ids.to(logits.device)].tolist(),
        "spread": float(logits.std()),
    }


def probe_difference(record: dict[str, Any], current: dict[str, Any]) -> float:
    """Largest difference of two records' logits, over the spread of all logits; infinite if they are not as many."""
    if len(record["logits"]) != len(current["logits"]):
        return float("inf")
    want, measured = (torch.tensor(probe["logits"], dtype=torch.float64) for probe in (record, current))
    return float((measured - want).abs().max() / max(record["spread"], 1e-30))
