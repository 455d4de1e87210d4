"""Linear algebra of the transforms: batched, Hermitian-safe, float64.

Results are on the device of the arguments; :mod:`surgery.running.moment_precision` chooses the device that factorizes.

Positive semidefinite matrices are factorized with ``eigh`` and a small damping. Plain Cholesky would fail: second
moments of activations are usually singular (biases, dead channels, fewer tokens than channels).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from surgery.running.moment_precision import solver_of

RELATIVE_FLOOR = 1e-9  # relative to the largest eigenvalue; directions below it count as empty


SHARED = 1_280
"""Matrix size n from which two threads find eigenvalues faster than one.
Smaller matrices lose more to synchronization: two threads took 59 ms against 13 ms on one (n = 384), 379 against 159
(1,152) and 812 against 1,122 (2,304)."""


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``torch.linalg.eigh`` on the solver's device, on one thread if that is faster."""
    with torch_threads(_thread_count(matrix)):
        values, vectors = torch.linalg.eigh(matrix.to(solver_of(matrix)))
        return values.to(matrix.device), vectors.to(matrix.device)


def eigvalsh(matrix: Tensor) -> Tensor:
    """Compute ``torch.linalg.eigvalsh`` on the solver's device, on one thread if that is faster."""
    with torch_threads(_thread_count(matrix)):
        return torch.linalg.eigvalsh(matrix.to(solver_of(matrix))).to(matrix.device)


def _thread_count(matrix: Tensor) -> int:
    return 1 if matrix.shape[-1] < SHARED else torch.get_num_threads()


def relative(error: float, whole: float) -> float:
    """Return ``error / whole``; for a whole of zero (the output of a dead layer), 1 for any error and 0 for none."""
    return error / whole if whole else float(error > 0)


def psd_powers(matrix: Tensor, exponents: tuple[float, ...]) -> list[Tensor]:
    """Compute ``matrix ** e`` for each exponent e; ``matrix`` [..., n, n] is positive semidefinite.

    Eigenvalues are raised by a floor relative to the largest, so that negative powers exist. A zero matrix, as of a
    dead head, gets the floor of the identity.
    """
    device = matrix.device
    values, vectors = eigh(matrix.to(solver_of(matrix)))
    largest = values.amax(-1, keepdim=True)
    largest = torch.where(largest * RELATIVE_FLOOR > torch.finfo(values.dtype).tiny, largest, 1.0)
    values = values.clamp_min(0) + largest * RELATIVE_FLOOR
    powers = [(vectors * values.pow(e).to(vectors.dtype)[..., None, :]) @ vectors.mH for e in exponents]
    return [power.to(device) for power in powers]


def left_root(matrix: Tensor) -> Tensor:
    """Compute R with ``R Rᵀ = matrix`` [n, n].

    Cholesky takes a tenth of the time of the symmetric root, the fallback if rounding made the matrix indefinite.
    """
    root, failed = torch.linalg.cholesky_ex(matrix.to(solver_of(matrix)))
    return psd_powers(matrix, (0.5,))[0] if failed else root.to(matrix.device)


def eigh_descending(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues and eigenvectors (columns) in descending order."""
    values, vectors = eigh(matrix)
    return values.flip(-1), vectors.flip(-1)


def damp(matrix: Tensor, fraction: float = 1e-6) -> Tensor:
    """Add ``fraction`` times the mean of the diagonal to the diagonal; the default is for metrics of the loss."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).real
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix + (fraction * mean)[..., None, None] * eye


def reduced_rank_projection(moment: Tensor, metric: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the best map ``z → up (down z)`` of rank ``rank`` under a metric on its output (reduced-rank regression).

    Minimizes ``E ‖M^{1/2} (z - up down z)‖²`` with ``E[z zᵀ] = C``. With the singular value decomposition
    ``M^{1/2} C^{1/2} = U Σ Vᵀ`` the solution is ``up down = M^{-1/2} U_r Σ_r V_rᵀ C^{-1/2}``. Since
    ``Σ_r V_rᵀ C^{-1/2} = U_rᵀ M^{1/2}``, ``C`` is never inverted.

    Args:
        moment: C [n, n].
        metric: M [n, n], positive definite (damp it first).
        rank: at most n.

    Returns:
        down [rank, n], up [n, rank], and all n squared singular values, descending. The values beyond ``rank`` sum to
        the error; the first ``rank`` are the variances of the latent ``down z``.
    """
    device, solver = moment.device, solver_of(moment)
    root, inverse_root = psd_powers(metric.to(solver), (0.5, -0.5))
    energy, basis = eigh_descending(root @ moment.to(solver) @ root)
    leading = basis[:, :rank]
    return tuple(part.to(device) for part in (leading.mT @ root, inverse_root @ leading, energy.clamp_min(0)))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads in the block, and restore it afterwards.

    This also affects operators in other Python threads meanwhile, which changes their last digits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
