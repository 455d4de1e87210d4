"""Orders that are the same on every machine and in every version of every library: integer arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np

from surgery.common.errors import SurgeryError

PARTS = 1000
"""Shares of a mixture are kept to a thousandth."""


def shuffled(count: int, *seed: int) -> np.ndarray:
    """A permutation of 0 … count - 1, int64 [count], that the integers of `seed` decide.

    Every index gets a key, a hash of itself and the seed, and the keys are sorted. The hash is the finalizer of
    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    state = np.zeros(1, dtype=np.uint64)
    for part in seed:
        state = _mixed(state + np.uint64(part % 2**64))
    return np.argsort(_mixed(state + np.arange(count, dtype=np.uint64)), kind="stable")


def interleaving(weights: Sequence[float]) -> np.ndarray:
    """One period of a mixture: which part, int64 [period], each number of the period is taken from.

    Every part comes as often as its weight says, to a thousandth of the whole, and as evenly as can be: each place goes
    to the part that is furthest behind.

    Raises:
        SurgeryError: a weight is not positive, or below a thousandth of all.
    """
    total = sum(weights)
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise SurgeryError(f"weights {list(weights)} of a mixture: all must be above 0")
    if min(weights) < total / PARTS:
        raise SurgeryError(f"weights {list(weights)} of a mixture: none may be below a thousandth of all")
    exact = [weight / total * PARTS for weight in weights]
    counts = [int(share) for share in exact]
    # Largest remainders get what rounding down left over.
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
    """SplitMix64 of uint64 keys; overflow is part of it."""
    keys = keys + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
