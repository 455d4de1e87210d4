"""Ties between scores, ordered by something finer."""

from __future__ import annotations

import torch
from torch import Tensor


def break_ties(scores: Tensor, by: Tensor) -> Tensor:
    """Orders heads of equal score by a second quantity.

    Args:
        scores, by: of one shape, finite.

    Returns:
        Float32: no score moves by as much as half the smallest gap between different scores, so that different ones
        keep their order; equal ones get that of ``by``, as far as float32 can tell them apart.
    """
    values = scores.double().unique()
    gap = values.diff().min() if len(values) > 1 else torch.ones((), dtype=torch.float64)
    levels, level = by.double().unique(return_inverse=True)
    return (scores.double() + gap / 2 * level / len(levels)).float()
