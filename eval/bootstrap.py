"""Confidence intervals of paired differences, by bootstrap over samples (Efron 1979; Koehn 2004 for paired systems)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surgery.common.errors import SurgeryError

RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean of a measured value minus that of the baseline on the same samples, with a 95% percentile interval.

    The interval covers the choice of samples only: not the seed of a calibration, nor other texts than those sampled.
    A single sample says nothing of the choice: ``low`` and ``high`` are None.
    """

    difference: float
    low: float | None
    high: float | None
    samples: int


def paired_difference(measured: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Difference:
    """Bootstraps the mean of `measured - baseline`, sample by sample.

    Raises:
        SurgeryError: the two have different numbers of samples, or none.
    """
    if len(measured) != len(baseline) or not len(measured):
        raise SurgeryError(f"no paired comparison of {len(measured)} with {len(baseline)} samples")
    differences = np.asarray(measured, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    if len(differences) == 1:
        return Difference(float(differences[0]), None, None, 1)
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    # A thousand resamples at a time: ten thousand of many samples would be gigabytes.
    for start in range(0, RESAMPLES, 1000):
        indices = rng.integers(len(differences), size=(1000, len(differences)))
        means[start : start + 1000] = differences[indices].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(differences.mean()), float(low), float(high), len(differences))
