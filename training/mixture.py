"""Weighted mixture of data sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from surgery.training.data import Sequences, TrainingRow
from surgery.training.packing import digest
from surgery.training.shuffling import interleaving


class MixedSequences:
    """Sequences interleaved from several sources by weight, with a period of at most 1,000. See `Sequences`.

    Every sequence of the mixture is the next one of its source, so that each source is read in order, epoch after
    epoch, at its own rate.
    """

    def __init__(self, parts: Sequence[Sequences], weights: Sequence[float]) -> None:
        """Mix `parts` by relative `weights`; see `surgery.training.shuffling.interleaving`."""
        self._parts, self._weights = list(parts), list(weights)
        self._order = interleaving(weights)
        ones = self._order[:, None] == np.arange(len(self._parts))
        self._in_period = ones.sum(axis=0)
        self._before = np.concatenate([np.zeros((1, len(self._parts)), dtype=np.int64), np.cumsum(ones, axis=0)])
        self.data_sha256 = digest({"parts": [part.data_sha256 for part in parts], "order": self._order.tolist()})

    def sequence(self, number: int) -> TrainingRow:
        period, position = divmod(number, len(self._order))
        part = int(self._order[position])
        return self._parts[part].sequence(int(period * self._in_period[part] + self._before[position, part]))

    def describe(self) -> dict[str, Any]:
        total = sum(self._weights)
        return {
            "mixture": [
                {"weight": round(weight / total, 4), **part.describe()}
                for weight, part in zip(self._weights, self._parts, strict=True)
            ]
        }


def shares_of(count: int, weights: Sequence[float]) -> list[int]:
    """Count the sequences of each part among the first `count` of a mixture."""
    order = interleaving(weights)
    return np.bincount(order[np.arange(count) % len(order)], minlength=len(weights)).tolist()
