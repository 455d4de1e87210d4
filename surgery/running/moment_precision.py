"""Devices and dtypes for sums and factorizations of second moments, by the device of the activations.

============================  =====================  ========================  ==========================
device of the activations     products of a batch    sums over batches         eigenvalues and Cholesky
============================  =====================  ========================  ==========================
CPU                           activations' dtype     float64                   float64
CUDA with fast float64        float64                float64, on the device    float64, on the device
other CUDA                    activations' dtype     float64, on the device    float64, on the CPU
other accelerators (MPS)      activations' dtype     float64, on the CPU       float64, on the CPU
============================  =====================  ========================  ==========================

The activations' dtype is at least float32. TF32, with three significant digits, stays off, which is torch's default.
Data-center GPUs have fast float64, at half the rate of float32 or more; others have a 32nd or a 64th.

On CUDA the sums of one layer exist twice, for a part of the text and for all of it: 2·8·2 n² bytes with gradients and n
key and value elements per token, 2·8·3 n² with a key norm as well. That is 0.1 GB for Llama-3-8B (n = 2,048) and 2.1 GB
for Llama-2-7B (n = 8,192). If they would take over half of the free memory, they are summed on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

FAST_FLOAT64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
"""Compute capabilities of GPUs with fast float64: P100, V100, A100, H100 and H200, B200."""

SMALLEST = 512
"""Matrix size from which a factorization moves to another device; smaller ones are fast on their own device.
A guess: no GPU has been measured."""

WITH_FLOAT64 = ("cpu", "cuda")
"""Device types that support float64."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class MomentPrecision:
    """Precision and devices for activations on one device: minimum dtype of products, float64 sums, factorizations."""

    products: torch.dtype = torch.float32
    sums: torch.device = CPU
    solver: torch.device = CPU

    @classmethod
    def of(cls, device: str | torch.device, sums_bytes: int = 0) -> MomentPrecision:
        """Choose precision and devices for activations on a device.

        Args:
            sums_bytes: bytes of all sums that exist at the same time.
        """
        device = torch.device(device)
        if device.type != "cuda":
            return cls()
        fast = torch.version.cuda is not None and torch.cuda.get_device_capability(device) in FAST_FLOAT64
        fits = 2 * sums_bytes <= _free_bytes(device)
        return cls(torch.float64 if fast else torch.float32, device if fits else CPU, device if fast and fits else CPU)

    def gram(self, rows: Tensor, weight: Tensor | None = None) -> Tensor:
        """Compute the Gram matrix Σ w x xᵀ of rows [m, n], [n, n] in float64, on the device of the sums."""
        x = self.widened(rows)
        return self.kept(x.mT @ (x if weight is None else x * weight[:, None].to(x)))

    def total(self, values: Tensor, dims: int | tuple[int, ...] = 0) -> Tensor:
        """Sum values over dimensions in float64, on the device of the sums."""
        return self.kept((values.double() if values.device.type in WITH_FLOAT64 else values.float()).sum(dims))

    def widened(self, rows: Tensor) -> Tensor:
        """Upcast rows to the dtype of products."""
        return rows.to(torch.promote_types(rows.dtype, self.products))

    def kept(self, values: Tensor) -> Tensor:
        """Move values to the device of the sums, in float64 or complex128."""
        dtype = torch.complex128 if values.is_complex() else torch.float64
        if values.device.type not in WITH_FLOAT64:
            return values.cpu().to(dtype)
        return values.to(dtype).to(self.sums)


_solver = CPU


@contextmanager
def factorizing_on(device: str | torch.device) -> Iterator[None]:
    """Factorize large CPU matrices on a device in a ``with`` block, if it has fast float64."""
    global _solver
    before, _solver = _solver, MomentPrecision.of(device).solver
    try:
        yield
    finally:
        _solver = before


def solver_of(matrix: Tensor) -> torch.device:
    """Return the device to factorize a matrix [..., n, n]: its own, or for large CPU ones that of `factorizing_on`."""
    return _solver if matrix.device.type == "cpu" and matrix.shape[-1] >= SMALLEST else matrix.device


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that torch can allocate: free device memory, and unused memory in its caching allocator."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
