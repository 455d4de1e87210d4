"""Breaking of ties between scores."""

from __future__ import annotations

import torch
from torch import Tensor


def break_ties(scores: Tensor, by: Tensor) -> Tensor:
    """Order heads with equal scores by a second quantity of equal shape.

    Returns float32 scores, each moved by less than half the smallest gap between different scores, so that these keep
    their order.
    """
    values = scores.double().unique()
    gap = values.diff().min() if len(values) > 1 else torch.ones((), dtype=torch.float64)
    levels, level = by.double().unique(return_inverse=True)
    return (scores.double() + gap / 2 * level / len(levels)).float()
