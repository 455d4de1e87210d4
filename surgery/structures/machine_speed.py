"""How fast this machine multiplies large matrices, by one quick benchmark: what a dry run tells times by."""

from __future__ import annotations

import time
from functools import cache

import torch

BENCHMARK_SIZE, BENCHMARK_SECONDS = 1024, 0.15


def measure_speed(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Floating point operations per second of a large matrix product: in ``dtype`` on the device, in float64 here."""
    return {
        "flops_per_second": _matmul_speed(device, dtype),
        "float64_flops_per_second": _matmul_speed(torch.device("cpu"), torch.float64),
    }


@cache
def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Measured once in a process: dry runs of many targets ask for it."""
    matrix = torch.ones(BENCHMARK_SIZE, BENCHMARK_SIZE, device=device, dtype=dtype)

    def synchronise() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    _ = matrix @ matrix
    synchronise()
    start, runs = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < BENCHMARK_SECONDS or not runs:
        _ = matrix @ matrix
        synchronise()
        runs += 1
    return 2 * BENCHMARK_SIZE**3 * runs / elapsed
