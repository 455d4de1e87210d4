"""Fisher information of keys and values as a Kronecker product, fitted to tokens instead of averages.

To second order, an error ``δ = Δ z`` of keys and values increases the loss by ``E[(gᵀ Δ z)²] / 2`` nats, with g the
loss gradient. K-FAC (Martens and Grosse 2015, arXiv:1503.05671) approximates this by ``E[g gᵀ] ⊗ E[z zᵀ]``, which
assumes that g and z are independent. In real models they are not: a few tokens, above all the first, carry most of the
gradient and dominate both averages. Maximum likelihood for ``g zᵀ`` under a matrix normal distribution ``F ⊗ A``
(Dutilleul 1999, J. Stat. Comput. Simul. 64; the "flip-flop" algorithm) weights each token's ``z zᵀ`` by the squared
Mahalanobis norm of its gradient, ``gᵀ F⁻¹ g / n``, and its ``g gᵀ`` by ``zᵀ A⁻¹ z / n``, so that directions of a few
tokens stay confined to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.running.moment_precision import MomentPrecision

SWEEPS = 2
"""Number of alternations; more change the loss of conversions of SmolLM2-135M by less than its error."""
DAMPING = 1e-2
"""Damping of a factor before inversion, relative to its mean diagonal: with few tokens it is singular."""


Held = Sequence[Sequence[Tensor]]
"""Batches of token rows [B, n] for each part of the tokens."""


@dataclass
class KroneckerFactors:
    """Factors of ``F ⊗ A``, scaled to nats: an error ``Δ z`` increases the loss by half the trace of ``Δᵀ F Δ A``."""

    moment: Tensor  # A [n, n], float64, scaled to a mean: Σ w z zᵀ / Σ w
    gradient: Tensor  # F [n, n], float64
    token_weights: list[Tensor]  # w of each token, with mean one, float64, by parts
    gradient_weights: list[Tensor]  # weight of each token's g gᵀ in F, float64, by parts


def kronecker_factors(
    rows: Held,
    gradients: Held,
    gradient: Tensor | None = None,
    *,
    sweeps: int = SWEEPS,
    device: str | torch.device = "cpu",
) -> KroneckerFactors | None:
    """Fit the two factors.

    Args:
        rows: z of tokens.
        gradients: g of the same tokens.
        gradient: E[g gᵀ] in float64, if known.
        sweeps: number of alternations.
        device: device for products of batches, see :mod:`surgery.running.moment_precision`.

    Returns:
        The factors on the CPU; None if all gradients or all rows are zero.
    """
    if gradient is None:
        gradient = weighted_moment(gradients, device=device)
    if not gradient.trace() > 0 or not any(bool(batch.any()) for part in rows for batch in part):
        return None
    for _ in range(sweeps):
        weights = _unusual(gradients, gradient, device)
        moment = weighted_moment(rows, weights, device=device)
        gradient_weights = _unusual(rows, moment, device)
        gradient = weighted_moment(gradients, gradient_weights, device=device)
    mean = torch.cat(weights).mean()
    moment, gradient = (moment / mean).cpu(), (gradient * mean).cpu()
    return KroneckerFactors(moment, gradient, [w / mean for w in weights], [w * mean for w in gradient_weights])


def weighted_moment(
    rows: Held, weights: Sequence[Tensor] | None = None, *, device: str | torch.device = "cpu"
) -> Tensor:
    """Compute ``Σ w x xᵀ / N`` over N rows in float64; weights by parts, None for unit weights."""
    precision = _precision(rows, device)
    return _mean(lambda batch, weight: precision.gram(batch.to(device), weight), rows, weights)


def weighted_mean(rows: Held, weights: Sequence[Tensor], *, device: str | torch.device = "cpu") -> Tensor:
    """Compute ``Σ w x / N`` over N rows, float64 on the CPU."""
    precision = _precision(rows, device)

    def product(batch: Tensor, weight: Tensor) -> Tensor:
        x = batch.to(precision.sums).double()
        return weight.to(x) @ x

    return _mean(product, rows, weights).cpu()


def _precision(rows: Held, device: str | torch.device) -> MomentPrecision:
    width = next((batch.shape[-1] for part in rows for batch in part), 0)
    return MomentPrecision.of(device, 4 * 8 * width**2)  # two sums, a root and its inverse


def _mean(of_batch: Callable[[Tensor, Tensor | None], Tensor], rows: Held, weights: Sequence[Tensor] | None) -> Tensor:
    """Sum a function of batches, first over each part, and divide by the number of rows."""
    total, count = 0.0, 0
    for part, batches in enumerate(rows):
        part_total, start = 0.0, 0
        for batch in batches:
            weight = None if weights is None else weights[part][start : start + len(batch)]
            part_total += of_batch(batch, weight)
            start += len(batch)
        total += part_total
        count += start
    return total / count


def _unusual(rows: Held, moment: Tensor, device: str | torch.device) -> list[Tensor]:
    """Compute ``xᵀ M⁻¹ x / n`` of each row, float64, by parts; one on average if M is the rows' moment."""
    size, precision = len(moment), _precision(rows, device)
    moment = moment.to(precision.solver)
    damped = moment + DAMPING * moment.trace() / size * torch.eye(size, dtype=moment.dtype, device=moment.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    by_part = []
    for batches in rows:
        unusual_rows = []
        for batch in batches:
            x = precision.widened(batch.to(device))
            inverse = inverse.to(x)
            unusual_rows.append(precision.kept(((x @ inverse) * x).sum(-1)))
        by_part.append(torch.cat(unusual_rows).cpu() / size)
    return by_part
