"""Query biases in a class without them: a full-rank query latent [x ; 1] with a neutral norm.

The class has a bias on the down projection. It sets a constant channel, which is the 1 and dominates the norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CONSTANT = 2.0**15
"""Constant channel for unscaled inputs: the norm's relative error is |x|²/2^31."""
LARGEST_WEIGHT = 2.0**14
"""Largest weight of the norm at the constant channel; its inverse is the smallest."""


def query_latent(query: Tensor, bias: Tensor, input_scale: float) -> dict[str, Tensor]:
    """Return tensors that compute ``query x + bias`` through a latent [x ; 1].

    The norm's weight at the constant is chosen so that no bias exceeds the largest weight of its row in ``q_b_proj``,
    since weight quantizers use one scale for both.

    Args:
        query: [n, D].
        bias: [n].
        input_scale: factor already applied to the inputs x.
    """
    width = query.shape[1] + 1
    constant = CONSTANT * input_scale
    rms = constant / math.sqrt(width)
    weight = 2.0 ** round(math.log2(rms))
    gain, unit = weight / rms, constant / rms
    query, tiny = query / gain, torch.finfo(torch.float32).tiny
    largest = query.abs().amax(1)
    ratio = float((bias.abs() / largest)[largest > tiny].max()) if bool((largest > tiny).any()) else 1.0
    exponent = math.ceil(math.log2(max(ratio / unit, 1 / LARGEST_WEIGHT)))
    weights = torch.full((width,), weight)
    weights[-1] = min(2.0**exponent, LARGEST_WEIGHT)
    return {
        "q_a_proj.weight": torch.eye(width, width - 1, dtype=query.dtype),
        "q_a_proj.bias": torch.nn.functional.pad(query.new_full((1,), constant), (width - 1, 0)),
        "q_a_layernorm.weight": weights,
        "q_b_proj.weight": torch.cat([query, bias[:, None] / (float(weights[-1]) * unit)], dim=1),
    }
