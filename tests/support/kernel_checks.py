"""Checks of kernels: against fp64, in poisoned memory, and compiled for GPUs that are not there."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surgery.kernels.bench.gate import EPSILON, LEAST, relative_error

SUPPORT = Path(__file__).resolve().parent


def assert_close(name: str, result: Tensor, expected: Tensor, *, units: float = 4.0) -> None:
    """Finite where expected is, infinite where it is, and within `units` roundings of the dtype (relative RMS).

    `expected` is the reference in float64. fp32 results have a floor of 2e-6 for sums in another order.
    """
    assert result.shape == expected.shape, f"{name}: {tuple(result.shape)} instead of {tuple(expected.shape)}"
    finite = expected.isfinite()
    assert torch.equal(result.isfinite(), finite), f"{name}: other entries are finite"
    assert torch.equal(result[~finite].double(), expected[~finite].double()), f"{name}: other infinities"
    if finite.any():
        error = relative_error(result[finite], expected[finite].double())
        limit = max(units * EPSILON[result.dtype], LEAST)
        assert error <= limit, f"{name}: relative error {error:.2e}, at most {limit:.2e}"


def counts(values: list[int] | None, device: torch.device | str) -> Tensor | None:
    """Counts of rows as operators take them."""
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)


@contextmanager
def only_kernels() -> Iterator[None]:
    """Within it, an operation fails where it would run as its reference, which would pass every comparison."""

    def fail(operation: str, reason: str) -> None:
        pytest.fail(f"{operation} would have run in plain PyTorch: {reason}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surgery.kernels.operation.tell_once", fail)
        yield


def compiled(cases: str, capabilities: tuple[int, ...] = (80, 90)) -> dict[str, dict[str, dict]]:
    """Facts of launches, by name and "80" or "90"; compiled in a process that does not interpret kernels.

    Args:
        cases: "module:function" in the folders of tests; the function returns launches by name, on the meta device,
            and may want the capability.
        capabilities: what each is compiled for.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The repository itself first: these tests', not the one that happens to be installed.
    path = os.pathsep.join(map(str, (SUPPORT.parents[1], SUPPORT, SUPPORT.parent / "kernels")))
    environment |= {"PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "compile_launches.py"), cases, *map(str, capabilities)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)
