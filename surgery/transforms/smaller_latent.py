"""MLA → MLA of a smaller rank: which subspace of the latents is kept, and how it passes the norm that stays there.

A latent ``c = a / sqrt(mean(a²) + eps)`` is linear in the input a but for its norm, one number a token. Keeping ``P c``
for a projection P of rank r' is ``P a`` times that same number, which the smaller layer has to get from what it keeps:

    a' = s Qᵀ P a,   c' = a' / sqrt(mean(a'²) + eps),   c ≈ (1/s) Q c'

with Q an orthonormal basis of what P keeps, so that ``|a'| = s |P a|``, and s such that ``mean(a'²)`` is ``mean(a²)``
on average, where eps then counts as it did. At full rank ``P = I``, Q is a rotation, and all of it is exact. Below that
a token's norm is off by a factor 1 + δ with, to first order in what is dropped, ``e = c - P c``, ``δ = (c · e) / r``
about its mean.

So an error e costs ``eᵀ M e`` with M the loss's metric, and by the wrong norm ``E δ²`` times what all latents cost,
``tr(M C)`` with ``C = E[c cᵀ]``. With ``E (c · e)² ≈ E[eᵀ C e]`` both are one metric, ``M + tr(M C) / r² · C``, in
which the best projection is reduced-rank regression's. Where a norm does nothing, as in checkpoints of ours, latents
are small against eps, and the second part is too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.transforms.algebra import damp, eigh_descending, reduced_rank_projection

METRIC_DAMPING = 1e-6


@dataclass(frozen=True)
class SmallerLatent:
    """A layer with fewer latents, which come in the order of their energy.

    Attributes:
        energy: of all latents of the source in the metric, descending: what each costs to drop.
    """

    layer: LatentAnatomy
    energy: Tensor

    @property
    def error(self) -> float:
        """Predicted squared error of the latents in the metric."""
        return float(self.energy[self.layer.rank :].sum())


def smaller_latent(anatomy: LatentAnatomy, statistics: LayerStatistics, rank: int) -> SmallerLatent:
    """Keeps ``rank`` latents of one layer.

    Args:
        anatomy: the layer in float64.
        statistics: of its rotary key and latents, with a metric of the loss.
        rank: r', at most r.
    """
    latents, width = slice(anatomy.head_dim, None), anatomy.rank
    moment, weighted = statistics.moment[latents, latents], statistics.gradient_weighted_moment[latents, latents]
    metric = damp(statistics.metric[latents, latents], METRIC_DAMPING)
    metric = metric + (metric @ weighted).trace() / width**2 * moment
    down, up, energy = reduced_rank_projection(weighted, metric, rank)
    projection = up @ down
    basis, scale = _axes(up, projection @ moment @ projection.mT, moment)

    def of_rows(part: Tensor) -> Tensor:
        return torch.cat([scale * basis.mT @ projection @ part[:width], part[width:]])

    smaller = replace(
        anatomy,
        down=of_rows(anatomy.down),
        down_bias=None if anatomy.down_bias is None else of_rows(anatomy.down_bias),
        up=anatomy.up @ basis / scale,
    )
    return SmallerLatent(smaller, energy)


def _axes(up: Tensor, weight: Tensor, moment: Tensor) -> tuple[Tensor, float]:
    """Q [r, r'], the principal axes of what is kept, and s.

    Args:
        up: whose columns [r, r'] span it.
        weight, moment: second moments [r, r] of what is kept and of all latents.
    """
    span = torch.linalg.qr(up).Q
    _, axes = eigh_descending(span.mT @ weight @ span)
    energy = float(weight.trace())
    share = float(moment.trace()) / energy if energy > 0 else 1.0  # a dead layer has no norm to keep
    return span @ axes, (up.shape[1] / up.shape[0] * share) ** 0.5


@torch.no_grad()
def norm_error(source: LatentAnatomy, smaller: LatentAnatomy, inputs: Tensor) -> float:
    """Return how far the smaller layer's norm is off: the root mean square of δ over attention inputs [..., D]."""
    gains = [layer.gain(layer.latent(inputs)) for layer in (smaller, source)]
    return float((gains[0] / gains[1] - 1).square().mean().sqrt())
