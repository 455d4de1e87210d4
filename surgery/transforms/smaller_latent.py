"""MLA → MLA of a smaller rank: projection of the latent onto a subspace, in front of the latent norm that stays.

A latent ``c = a / sqrt(mean(a²) + eps)`` is linear in the input a except for its norm, one scalar per token. ``P c``,
for a projection P of rank r', is ``P a`` times that scalar, which the smaller layer must compute from what P keeps:

    a' = s Qᵀ P a,   c' = a' / sqrt(mean(a'²) + eps),   c ≈ (1/s) Q c'

Q is an orthonormal basis of the range of P, so that ``|a'| = s |P a|``. The scale s makes ``mean(a'²)`` equal
``mean(a²)`` on average, so that eps has the same effect. At full rank ``P = I``, Q is a rotation, and the result is
exact. Below full rank a token's norm is off by a factor 1 + δ. To first order in the dropped part ``e = c - P c``, δ
varies about its mean as ``δ = (c · e) / r``.

An error e costs ``eᵀ M e`` with M the metric of the loss. The wrong norm adds ``E δ²`` times the cost of all latents,
``tr(M C)`` with ``C = E[c cᵀ]``. With ``E (c · e)² ≈ E[eᵀ C e]`` both terms form one metric, ``M + tr(M C) / r² · C``,
in which reduced-rank regression gives the best projection. With a neutral norm, as in our checkpoints, latents are
small against eps, and so is the second term.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.transforms.algebra import damp, eigh_descending, reduced_rank_projection


@dataclass(frozen=True)
class SmallerLatent:
    """Layer with a smaller latent, whose channels are in the order of their energy.

    Attributes:
        energy: energies of all latent dimensions of the source in the metric, descending: the cost of dropping each.
    """

    layer: LatentAnatomy
    energy: Tensor

    @property
    def error(self) -> float:
        """Predicted squared error of the latents in the metric."""
        return float(self.energy[self.layer.rank :].sum())


def smaller_latent(anatomy: LatentAnatomy, statistics: LayerStatistics, rank: int) -> SmallerLatent:
    """Reduce the latent of one layer to ``rank``.

    Args:
        anatomy: the layer in float64.
        statistics: statistics of its rotary key and latent, with a metric of the loss.
        rank: r', at most r.
    """
    latents, width = slice(anatomy.head_dim, None), anatomy.rank
    moment, weighted = statistics.moment[latents, latents], statistics.gradient_weighted_moment[latents, latents]
    metric = damp(statistics.metric[latents, latents])
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
    """Compute Q [r, r'], the principal axes of the kept subspace, and the scale s.

    The columns of ``up`` [r, r'] span it; second moments [r, r] are of the projected and of the full latent.
    """
    span = torch.linalg.qr(up).Q
    _, axes = eigh_descending(span.mT @ weight @ span)
    energy = float(weight.trace())
    share = float(moment.trace()) / energy if energy > 0 else 1.0  # a dead layer has no norm to keep
    return span @ axes, (up.shape[1] / up.shape[0] * share) ** 0.5


@torch.no_grad()
def norm_error(source: LatentAnatomy, smaller: LatentAnatomy, inputs: Tensor) -> float:
    """Measure the error of the smaller layer's norm: the root mean square of δ over attention inputs [..., D]."""
    gains = [layer.gain(layer.latent(inputs)) for layer in (smaller, source)]
    return float((gains[0] / gains[1] - 1).square().mean().sqrt())
