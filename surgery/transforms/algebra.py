"""The linear algebra that all transforms share. Everything is batched, Hermitian-safe and in float64.

Results lie where their arguments do; :mod:`surgery.running.moment_precision` says which device factorizes.

Positive semidefinite matrices are always taken apart with ``eigh`` and a small damping, never with Cholesky: second
moments of activations are singular as a rule (biases, dead channels, fewer tokens than channels).
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.running.moment_precision import solver_of
from surgery.running.threads import torch_threads

RELATIVE_FLOOR = 1e-9  # of the largest eigenvalue: below it a direction counts as empty


SHARED = 1_280
"""Numbers of a row from which on eigenvalues are found sooner by two threads than by one. They wait for each other so
often that two threads, asleep as they wait, took 59 ms for what one did in 13 (384 numbers), 379 for 159 (1,152) and
812 for 1,122 (2,304)."""


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``torch.linalg.eigh``, on one thread where that is sooner, or on the solver's device."""
    with torch_threads(_worth(matrix)):
        values, vectors = torch.linalg.eigh(matrix.to(solver_of(matrix)))
        return values.to(matrix.device), vectors.to(matrix.device)


def eigvalsh(matrix: Tensor) -> Tensor:
    """Compute ``torch.linalg.eigvalsh``, on one thread where that is sooner, or on the solver's device."""
    with torch_threads(_worth(matrix)):
        return torch.linalg.eigvalsh(matrix.to(solver_of(matrix))).to(matrix.device)


def _worth(matrix: Tensor) -> int:
    return 1 if matrix.shape[-1] < SHARED else torch.get_num_threads()


def relative(error: float, whole: float) -> float:
    """``error / whole``. Of nothing, which a dead layer puts out, there is no share: any error is then all of it."""
    return error / whole if whole else float(error > 0)


def psd_powers(matrix: Tensor, exponents: tuple[float, ...], floor: float = RELATIVE_FLOOR) -> list[Tensor]:
    """``matrix ** e`` for each exponent e, of positive semidefinite matrices [..., n, n].

    Eigenvalues are raised by a relative floor, so that negative powers exist. Nothing is relative to a matrix of zeros,
    as of a head that is dead: its floor is that of the identity.
    """
    device = matrix.device
    values, vectors = eigh(matrix.to(solver_of(matrix)))
    largest = values.amax(-1, keepdim=True)
    largest = torch.where(largest * floor > torch.finfo(values.dtype).tiny, largest, 1.0)
    values = values.clamp_min(0) + largest * floor
    powers = [(vectors * values.pow(e).to(vectors.dtype)[..., None, :]) @ vectors.mH for e in exponents]
    return [power.to(device) for power in powers]


def left_root(matrix: Tensor) -> Tensor:
    """R with ``R Rᵀ`` the positive matrix: Cholesky's, a tenth of the time of the symmetric one, unless rounding left
    the matrix not positive."""
    root, failed = torch.linalg.cholesky_ex(matrix.to(solver_of(matrix)))
    return psd_powers(matrix, (0.5,))[0] if failed else root.to(matrix.device)


def eigh_descending(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors (columns), largest first."""
    values, vectors = eigh(matrix)
    return values.flip(-1), vectors.flip(-1)


def damp(matrix: Tensor, fraction: float) -> Tensor:
    """``matrix`` plus ``fraction`` of its mean diagonal on the diagonal."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).real
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix + (fraction * mean)[..., None, None] * eye


def reduced_rank_projection(moment: Tensor, metric: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best rank-``rank`` map  z → up (down z)  under a metric on its output.

    Minimizes ``E ‖M^{1/2} (z - up down z)‖²`` with ``E[z zᵀ] = C``: with the singular value decomposition
    ``M^{1/2} C^{1/2} = U Σ Vᵀ`` the answer is ``up down = M^{-1/2} U_r Σ_r V_rᵀ C^{-1/2}``, and
    ``Σ_r V_rᵀ C^{-1/2} = U_rᵀ M^{1/2}``, so that ``C`` never has to be inverted.

    Args:
        moment: C [n, n].
        metric: M [n, n], positive definite (damp it first).
        rank: at most n.

    Returns:
        down [rank, n], up [n, rank], and all n squared singular values: their sum beyond ``rank`` is the error, and
        the latent ``down z`` has those before ``rank`` as its variances.
    """
    device, solver = moment.device, solver_of(moment)
    root, inverse_root = psd_powers(metric.to(solver), (0.5, -0.5))
    energy, basis = eigh_descending(root @ moment.to(solver) @ root)
    leading = basis[:, :rank]
    return tuple(part.to(device) for part in (leading.mT @ root, inverse_root @ leading, energy.clamp_min(0)))
