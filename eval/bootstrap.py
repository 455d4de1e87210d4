"""Bootstrap confidence intervals of paired differences over samples (Efron 1979; Koehn 2004 for paired systems)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surgery.common.errors import SurgeryError

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean difference from the baseline on the same samples, with a 95% percentile interval.

    The interval covers the sampling error only, neither the calibration seed nor the choice of text. With a single
    sample there is no interval: ``low`` and ``high`` are None.
    """

    difference: float
    low: float | None
    high: float | None
    samples: int


def paired_difference(measured: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Difference:
    """Bootstrap the mean of the per-sample differences `measured - baseline`.

    Raises:
        SurgeryError: the numbers of samples differ or are 0.
    """
    if len(measured) != len(baseline) or not len(measured):
        raise SurgeryError(f"paired comparison needs equal numbers of samples, not {len(measured)} and {len(baseline)}")
    differences = np.asarray(measured, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    if len(differences) == 1:
        return Difference(float(differences[0]), None, None, 1)
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    # In chunks of 1,000 resamples: all 10,000 of many samples would take gigabytes.
    for start in range(0, RESAMPLES, 1000):
        indices = rng.integers(len(differences), size=(1000, len(differences)))
        means[start : start + 1000] = differences[indices].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(differences.mean()), float(low), float(high), len(differences))
