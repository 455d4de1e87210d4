"""Confidence intervals of paired differences over samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from surgery.common.errors import SurgeryError

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean difference from the baseline on the same samples, with a 95% interval.

    The interval covers the sampling error only, neither the calibration seed nor the choice of text. With a single
    sample there is no interval: ``low`` and ``high`` are None.
    """

    difference: float
    low: float | None
    high: float | None
    samples: int


def paired_difference(measured: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Estimate the mean of the per-sample differences `measured - baseline`.

    The interval is Student's. A percentile bootstrap covers 81% instead of 95% with 4 samples and 91% with 16. If all
    samples are 0 or 1, the interval is that of Agresti and Min (2005, Statistics in Medicine 24, 729-740): half an
    observation is added to each of the four outcomes of a pair, so that equal samples do not give an interval of no
    width. It need not be centered on the difference. Raises SurgeryError: the numbers of samples differ or are 0.
    """
    if len(measured) != len(baseline) or not len(measured):
        raise SurgeryError(f"paired comparison needs equal numbers of samples, not {len(measured)} and {len(baseline)}")
    pair = np.asarray([measured, baseline], dtype=np.float64)
    differences, samples = pair[0] - pair[1], len(measured)
    mean = float(differences.mean())
    if samples == 1:
        return Difference(mean, None, None, 1)
    if np.isin(pair, (0, 1)).all():
        total = samples + 2
        middle = differences.sum() / total
        normal = NormalDist().inv_cdf((1 + LEVEL) / 2)
        half = normal * math.sqrt((np.abs(differences).sum() + 1) / total - middle**2) / math.sqrt(total)
        return Difference(mean, float(max(middle - half, -1)), float(min(middle + half, 1)), samples)
    half = student_t(samples - 1, LEVEL) * float(differences.std(ddof=1)) / math.sqrt(samples)
    return Difference(mean, mean - half, mean + half, samples)


@functools.cache
def student_t(freedom: int, level: float) -> float:
    """Compute the half-width of Student's confidence interval in standard errors.

    Exact up to 1,000 degrees of freedom, 0.1% too wide above.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4, inverted by bisection.
    """
    freedom = min(freedom, 1000)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _coverage(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _coverage(angle: float, freedom: int) -> float:
    """Probability of at most √freedom·tan(angle) standard errors of deviation."""
    is_odd = freedom % 2
    term, total = math.cos(angle) ** is_odd, 0.0
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    inside = math.sin(angle) * total
    return 2 / math.pi * (angle + inside) if is_odd else inside
