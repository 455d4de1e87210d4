"""Probe of a written checkpoint: a few logits in the report, by which `surgery verify` detects changes later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.running.layer_stream import LayerStream

TOKENS = 16
KEPT = 16
"""Number of recorded logits, with ids evenly spaced over the vocabulary."""


def compute_probe(stream: LayerStream, tokens: Tensor, hidden: Tensor, piece: int | None) -> dict[str, Any]:
    """Compute the probe as JSON values, from the logits after the first `TOKENS` of tokens [T].

    ``hidden`` [T, D] are the last layer's outputs, of ``piece`` tokens per forward pass through a cache, or of one
    pass.
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
    """Return the largest difference of two probes' logits over their standard deviation; inf if the counts differ."""
    if len(record["logits"]) != len(current["logits"]):
        return float("inf")
    want, measured = (torch.tensor(probe["logits"], dtype=torch.float64) for probe in (record, current))
    return float((measured - want).abs().max() / max(record["spread"], 1e-30))
