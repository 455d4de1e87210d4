"""The Fisher information of keys and values as one Kronecker product, fitted to tokens instead of to averages.

To second order an error ``δ = Δ z`` of keys and values costs ``E[(gᵀ Δ z)²] / 2`` nats, with g the loss gradient. K-FAC
(Martens and Grosse 2015, arXiv:1503.05671) reads that as ``E[g gᵀ] ⊗ E[z zᵀ]``, which takes g and z for independent. In
real models they are not: a few tokens, the first above all, carry most of the gradient, and both averages are theirs.
Maximum likelihood for ``g zᵀ`` under a matrix normal distribution ``F ⊗ A`` (Dutilleul 1999, J. Stat. Comput. Simul.
64; the "flip-flop" algorithm) weights every token's ``z zᵀ`` by how unusual its gradient is in all directions at once,
``gᵀ F⁻¹ g / n``, and its ``g gᵀ`` by ``zᵀ A⁻¹ z / n``: what few tokens do in few directions stays theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.running.activations import give_back

SWEEPS = 2
"""Alternations; further ones change the loss of conversions of SmolLM2-135M by less than its error."""
DAMPING = 1e-2
"""Added to a factor's diagonal before it is inverted, in shares of its mean: few tokens leave directions empty."""


@dataclass
class KroneckerFactors:
    """``F ⊗ A``, in the scale of nats: half the trace of ``Δᵀ F Δ A`` is the loss that an error ``Δ z`` costs."""

    moment: Tensor  # A [n, n], float64, scaled to a mean: Σ w z zᵀ / Σ w
    gradient: Tensor  # F [n, n], float64
    token_weight: Tensor  # w of every token, of mean one, float64 [N]
    gradient_weight: Tensor  # what each token's g gᵀ counts in F, float64 [N]


def kronecker_factors(
    rows: Sequence[Tensor], gradients: Sequence[Tensor], device: str | torch.device = "cpu"
) -> KroneckerFactors | None:
    """Fits the two factors.

    Args:
        rows: z in batches [B, n]; products are taken in their dtype (float32 or better) and summed in float64.
        gradients: g of the same tokens.
        device: where products are taken, batch by batch.

    Returns:
        The factors on the CPU; None where all gradients, or all rows, are zero.
    """
    gradient = weighted_moment(gradients, device=device)
    if not (gradient.trace() > 0 and weighted_moment(rows, device=device).trace() > 0):
        return None
    for _ in range(SWEEPS):
        weight = _unusual(gradients, gradient, device)
        moment = weighted_moment(rows, weight, device=device)
        gradient_weight = _unusual(rows, moment, device)
        gradient = weighted_moment(gradients, gradient_weight, device=device)
    mean = weight.mean()
    return KroneckerFactors(moment / mean, gradient * mean, weight / mean, gradient_weight * mean)


def weighted_moment(
    rows: Sequence[Tensor], weight: Tensor | None = None, *, device: str | torch.device = "cpu"
) -> Tensor:
    """``Σ w x xᵀ / N`` over N rows in batches [B, n], float64 on the CPU; weights [N], or of one."""
    total, start = 0.0, 0
    for batch in rows:
        x = weighted = batch.to(device)
        if weight is not None:
            weighted = x * weight[start : start + len(x), None].to(x)
        total, start = total + (x.mT @ weighted).double().cpu(), start + len(x)
        give_back(batch)
    return total / start


def _unusual(rows: Sequence[Tensor], moment: Tensor, device: str | torch.device) -> Tensor:
    """``xᵀ M⁻¹ x / n`` of every row, float64 [N]: one on average where M is the rows' own moment."""
    size = len(moment)
    damped = moment + DAMPING * moment.trace() / size * torch.eye(size, dtype=moment.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    found = []
    for batch in rows:
        x = batch.to(device)
        found.append(((x @ inverse.to(x)) * x).sum(-1).double().cpu())
        give_back(batch)
    return torch.cat(found) / size
