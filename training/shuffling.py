"""Permutations and interleavings in integer arithmetic, equal on every machine and with every library version."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np

from surgery.common.errors import SurgeryError

PARTS = 1000
"""Resolution of the shares of a mixture: a thousandth."""


def shuffled(count: int, *seed: int) -> np.ndarray:
    """Return a permutation of 0 … count - 1, int64 [count], seeded by the integers `seed`.

    It sorts the hashes of index and seed by the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    state = np.zeros(1, dtype=np.uint64)
    for part in seed:
        state = _mixed(state + np.uint64(part % 2**64))
    return np.argsort(_mixed(state + np.arange(count, dtype=np.uint64)), kind="stable")


def interleaving(weights: Sequence[float]) -> np.ndarray:
    """Return one period of a mixture: the part, int64 [period], of each sequence in the period.

    Shares follow the weights to a thousandth, evenly spaced: each position goes to the part with the largest deficit.
    Raises SurgeryError: a weight is not positive and finite, or below a thousandth of the sum.
    """
    total = sum(weights)
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise SurgeryError(f"weights of data must all be above 0, not {list(weights)}")
    if min(weights) < total / PARTS:
        raise SurgeryError(f"weights of data must each be at least 1/1000 of their sum, not {list(weights)}")
    exact = [weight / total * PARTS for weight in weights]
    counts = [int(share) for share in exact]
    # Largest remainder method.
    for part in sorted(range(len(counts)), key=lambda part: counts[part] - exact[part])[: PARTS - sum(counts)]:
        counts[part] += 1
    divisor = gcd(*counts)
    counts = [count // divisor for count in counts]
    period, credit, order = sum(counts), [0] * len(counts), []
    for _ in range(period):
        credit = [have + count for have, count in zip(credit, counts, strict=True)]
        part = credit.index(max(credit))
        credit[part] -= period
        order.append(part)
    return np.array(order, dtype=np.int64)


def _mixed(keys: np.ndarray) -> np.ndarray:
    """Hash uint64 keys with SplitMix64; overflow is intended."""
    keys = keys + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
