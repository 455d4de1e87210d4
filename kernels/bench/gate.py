"""Correctness gate: only cases with correct results are timed.

A case passes if its output, computed in memory that was filled with NaN,

- is finite and differs from the float64 reference by at most `UNITS` rounding errors of its dtype (relative RMS);
- has at most `WORSE` times the error of the most accurate library that computes the same in this dtype, if any;
- is bit-identical in a second run.

`pytest -m gpu tests/kernels` covers ragged batches, padding and pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from surgery.kernels.bench.case import Case, Inputs

UNITS = 4.0
WORSE = 2.0
WRONG = 0.1
"""Relative error above which a library is considered to compute something else."""
EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
"""Rounding error by dtype: half a unit in the last place, relative."""
LEAST = 2e-6
"""Minimum tolerance: the relative difference between fp32 sums in different orders."""


@dataclass
class Gate:
    """Result of a case's check; it passed if there are no reasons.

    Attributes:
        error: relative RMS error against float64, the maximum over the checked parts, up to a tolerance.
        bit_equal: whether a second run gave the same bits.
        library_errors, refused: errors of other implementations, or reasons why they cannot be compared, by name.
    """

    error: float = float("nan")
    tolerance: float = float("nan")
    bit_equal: bool = False
    library_errors: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.reasons

    @property
    def best_library(self) -> tuple[str, float] | None:
        """Name and error of the most accurate other implementation."""
        return min(self.library_errors.items(), key=lambda item: item[1]) if self.library_errors else None

    def to_dict(self) -> dict:
        best = self.best_library
        plain = {**asdict(self), "passed": self.passed, "best_library": best[0] if best else None}
        plain["times_best_library"] = self.error / best[1] if best and best[1] else None
        # JSON has no infinity.
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the RMS error relative to the RMS of `expected`; infinite if shapes differ or values are not finite."""
    if result.shape != expected.shape or not bool(result.isfinite().all()):
        return float("inf")
    difference = (result.double() - expected).square().mean().sqrt()
    return float(difference / expected.square().mean().sqrt().clamp(min=1e-300))


def check(case: Case, inputs: Inputs, *, baselines: bool = True) -> Gate:
    """Check a case's output; an exception of our own kernel counts as a failure."""
    gate = Gate(tolerance=max(UNITS * EPSILON[case.dtype], LEAST))
    try:
        parts = list(case.exact(inputs))
        with poisoned():
            first, second = case.run(inputs), case.run(inputs)
        gate.error = _max_error(first, parts)
        gate.bit_equal = torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    except Exception as error:
        gate.reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return gate
    if baselines:
        _libraries(case, inputs, parts, gate)
    gate.reasons += _reasons(gate)
    return gate


def _libraries(case: Case, inputs: Inputs, parts: list, gate: Gate) -> None:
    for name, prepare in case.baselines().items():
        try:
            error = _max_error(prepare(inputs)(), parts)
        except Exception as error:
            gate.refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            continue
        if error < WRONG:
            gate.library_errors[name] = error
        else:
            gate.refused[name] = f"differs from the reference: relative error {error:.1e}"


def _reasons(gate: Gate) -> Iterator[str]:
    if not gate.error <= gate.tolerance:
        yield f"relative error {gate.error:.1e} exceeds {gate.tolerance:.1e}"
    best = gate.best_library
    if best and gate.error > max(WORSE * best[1], LEAST):
        yield f"relative error {gate.error:.1e}, {gate.error / best[1]:.1f} times that of {best[0]}"
    if not gate.bit_equal:
        yield "results of two runs differ"


def _max_error(out: Tensor, parts: list[tuple[Callable[[Tensor], Tensor], Tensor]]) -> float:
    return max(relative_error(pick(out), expected) for pick, expected in parts)


@contextmanager
def poisoned() -> Iterator[None]:
    """Let `torch.empty` fill tensors with NaN, so that elements that a kernel does not write are detected."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
