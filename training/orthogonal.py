"""Latents that stay orthogonal while they train, as MatryoshkaKV has them (arXiv:2410.14731).

There keys are cached as Uᵀk with orthonormal columns U, so that the first r of them are the orthogonal projection on
the first r columns. Here a latent c = D x is read through an up-projection U, and both train freely, so a step bends
that. After it U = Q R is taken apart again, with Q orthonormal and R upper triangular, and

    U ← U R⁻¹ = Q,   D ← R D.

U D, what the whole model computes, is what it was. What a slice computes is then the projection of the whole on its
columns: of all down-projections to these columns, the one with the least error.

Orthonormal is meant in the metric in which the student's own columns are: conversions by the loss find columns with
Uᵀ M U = I, and M is not in the checkpoint. With U₀ = A S Bᵀ as it was loaded (thin), G = A S⁻² Aᵀ + σ² (I - A Aᵀ) has
U₀ᵀ G U₀ = I, with 1/σ the geometric mean of S. So an untrained student stays unchanged, and for orthonormal U₀ G = I.

Adam's moments are left unchanged. They belong to U and D before the change of basis; R is the identity up to terms
of the learning rate's size, so what is wrong in them is of that order too, and forgotten with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.training.nested import nested_attentions

SMALLEST = 1e-6
"""Smallest singular value of independent columns, as a share of the largest."""


@dataclass(frozen=True)
class Metric:
    """G^½ up to a rotation, of one block: x → σ x + A (stretch · (Aᵀ x)); in the parameters' dtype, on their device."""

    basis: Tensor  # A [n, r]
    stretch: Tensor  # S⁻¹ - σ, [r]
    sigma: float

    @classmethod
    def of(cls, up: Tensor, where: str) -> Metric:
        """Build the metric in which the columns of `up` [n, r] are orthonormal.

        Raises:
            SurgeryError: they are not independent.
        """
        basis, size, _ = torch.linalg.svd(up.double(), full_matrices=False)
        if len(up) < up.shape[1] or not size.min() > SMALLEST * size.max():
            raise SurgeryError(
                f"orthogonal: {where} reads its latents by columns that are not independent: set it to false",
                setting="orthogonal",
            )
        sigma = float(size.log().mean().neg().exp())
        return cls(basis.to(up), (1 / size - sigma).to(up), sigma)

    def __call__(self, up: Tensor) -> Tensor:
        """Columns [n, r], float64, as they are where the metric is the identity."""
        basis = self.basis.double()
        return self.sigma * up + basis @ (self.stretch.double()[:, None] * (basis.mT @ up))


class OrthogonalFactors:
    """Makes the columns orthonormal again that read the latents of a student, block by block."""

    def __init__(self, student: nn.Module) -> None:
        """Take the metric from a student with the weights that it was loaded with.

        Raises:
            SurgeryError: parameters are sharded or do not train, latents are read by several layers, or columns are
                not independent.
        """
        self._attentions = nested_attentions(student)
        self._metrics: list[list[Metric]] = []
        for index, attention in enumerate(self._attentions):
            where = f"layer {index}"
            _check_whole(attention)
            readers = attention.latent_readers()
            if not readers:
                raise SurgeryError(
                    f"orthogonal: the latents of {where} are read by other layers too: set it to false",
                    setting="orthogonal",
                )
            trained = [*attention.kv_down.parameters(), *(each for some in readers for each in some)]
            if not all(each.requires_grad for each in trained):
                raise SurgeryError(
                    f"orthogonal: not all that makes and reads the latents of {where} trains: set train to new",
                    setting="orthogonal",
                )
            self._metrics.append([Metric.of(torch.cat(some).detach(), where) for some in readers])

    @torch.no_grad()
    def after_step(self) -> None:
        """Takes up-projections to orthonormal columns, and down-projections along; the same on every process."""
        for attention, metrics in zip(self._attentions, self._metrics, strict=True):
            blocks = zip(attention.latent_slices, attention.latent_readers(), metrics, strict=True)
            for rows, readers, metric in blocks:
                change = _triangle(metric, torch.cat(readers).double())
                for view in readers:
                    view.copy_(torch.linalg.solve_triangular(change, view.double(), upper=True, left=False))
                for part in attention.kv_down.parameters():  # the weight [·, D], and a bias [·]
                    part[rows] = (change @ part[rows].double()).to(part.dtype)


def _triangle(metric: Metric, up: Tensor) -> Tensor:
    """R of columns [n, r] in a metric, with a positive diagonal: the identity where they are orthonormal."""
    change = torch.linalg.qr(metric(up), mode="r").R
    return change * change.diagonal().sign()[:, None]


def _check_whole(attention: nn.Module) -> None:
    """Raises SurgeryError if FSDP2 or ZeRO-3 have sharded an attention's parameters."""
    if any(hasattr(each, "full_tensor") or hasattr(each, "ds_id") for each in attention.parameters()):
        raise SurgeryError(
            "orthogonal needs whole parameters on every process, not sharded ones: set it to false",
            setting="orthogonal",
        )
