"""Allocation of one byte budget over packed rows: number of channels per layer, and bits per channel.

To second order a channel of energy λ (its share of the loss) costs λ if it is dropped and ``λ D(b)`` in b bits, with D
the noise of a uniform quantizer relative to the variance. The optimum under a budget has one price for all bits:
reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3). Rows consist of runs of bytes of one
pattern (:mod:`surgery.model.token_format`), in steps of :data:`GRANULE` bytes. Each section of a row is therefore
searched for the runs of least ``Σ λ D(b) + price · bytes``, and the price is bisected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from surgery.model.token_format import PATTERNS, Runs

GRANULE = 16
"""Bytes that a GPU loads at once; the bytes of a run are a multiple. Small models use less, see `granule_of`."""
WIDTHS = (8, 5, 4, 3, 2, 1)
BISECTIONS = 40


@cache
def noise(bits: int) -> float:
    """Compute the mean squared error of the best uniform quantizer with 2^bits levels on a standard normal value."""
    values = torch.linspace(-8, 8, 16_001, dtype=torch.float64)
    weight = torch.exp(-values.square() / 2)
    weight /= weight.sum()
    middle, highest = (2**bits - 1) / 2, 2**bits - 1
    steps = torch.logspace(math.log10(6.0 / 2**bits / 2), math.log10(16.0 / 2**bits), 200, dtype=torch.float64)
    errors = [
        float((weight * (((values / step + middle).round().clamp(0, highest) - middle) * step - values).square()).sum())
        for step in steps.tolist()
    ]
    return min(errors)


def granule_of(width: int) -> int:
    """Return the granule for a source that caches `width` values per token and layer: 16 bytes from 1,024 on, else 4.

    A granule of 16 bytes would be an eighth of a small model's row. The choice was tested on the demo model only, where
    4 gave a lower loss at an eighth of the bytes; not compared on SmolLM2-135M.
    """
    return GRANULE if width >= 1024 else 4


@dataclass(frozen=True)
class Section:
    """Part of a packed row whose channels are sorted by energy.

    Attributes:
        energies: energy of each unit, descending; comparable between all sections that share a budget.
        unit: number of channels that share their bits: 1, or 2 for complex components.
        least: minimum number of granules.
    """

    energies: Tensor
    unit: int = 1
    least: int = 0


FIELDS = np.array([[fields.count(width) for fields in PATTERNS.values()] for width in WIDTHS])
"""Number of fields of each width in a byte of each pattern, [widths, patterns]."""
MOVES = np.array(
    [
        [sign * size * ((column == target) - (column == source)) for column in range(len(PATTERNS))]
        for size in (4, 1)
        for source in range(len(PATTERNS))
        for target in range(-1, len(PATTERNS))
        for sign in (1, -1)
    ]
)
"""Moves of the search, in order, as changes of the granule counts, [moves, patterns].
Each shifts 4 or 1 granules between two patterns, or adds or removes them."""


class _Search:
    """Search for the runs of least cost of one section at a given price."""

    def __init__(self, section: Section, granule: int):
        self._sums = np.array([0.0, *section.energies.double().cumsum(0).tolist()])
        self._units = granule // section.unit  # units in a granule per field of the pattern
        self._granule = granule
        self.least = section.least
        self.counts = np.zeros(len(PATTERNS), dtype=np.int64)
        self.counts[list(PATTERNS).index("2+2+2+2")] = section.least

    def costs(self, counts: np.ndarray) -> np.ndarray:
        """Compute Σ λ D of the section for granule counts by pattern, [..., patterns] → [...]."""
        ends = np.minimum((counts @ FIELDS.T * self._units).cumsum(-1), len(self._sums) - 1)
        total, before = self._sums[-1], 0.0
        for column, width in enumerate(WIDTHS):
            reached = self._sums[ends[..., column]]
            total = total - (1 - noise(width)) * (reached - before)
            before = reached
        return total

    def settle(self, price: float) -> int:
        """Move to the runs of least cost at a price per byte; return their bytes."""
        best = float(self.costs(self.counts)) + price * self.bytes
        begin = 0  # the next move to try
        while True:
            counts = self.counts + MOVES
            costs = self.costs(np.maximum(counts, 0)) + price * (counts.sum(-1) * self._granule)
            better = self._possible(counts) & (costs < best * (1 - 1e-12))
            move = next(iter(np.flatnonzero(better[begin:])), None)
            if move is None and begin:
                move, begin = next(iter(np.flatnonzero(better)), None), 0
            if move is None:
                return self.bytes
            move += begin
            best, self.counts, begin = float(costs[move]), counts[move], (move + 1) % len(MOVES)

    def changes(self, sign: int) -> tuple[float, np.ndarray]:
        """Return the cost of the cheapest step of one granule, infinity if there is none, and the counts after it."""
        counts = self.counts + sign * np.eye(len(PATTERNS), dtype=np.int64)
        costs = self.costs(np.maximum(counts, 0)) - self.costs(self.counts)
        costs = np.where(self._possible(counts), costs, np.inf)
        pattern = int(costs.argmin())
        return float(costs[pattern]), counts[pattern]

    def _possible(self, counts: np.ndarray) -> np.ndarray:
        return (counts.min(-1) >= 0) & (counts.sum(-1) >= self.least)

    @property
    def bytes(self) -> int:
        return int(self.counts.sum()) * self._granule

    def runs(self) -> Runs:
        """Return the runs of the current counts."""
        counts = self.counts.tolist()
        return tuple((name, count * self._granule) for name, count in zip(PATTERNS, counts, strict=True) if count)


def row_cost(section: Section, runs: Runs) -> float:
    """Compute the error Σ λ D of a section in these runs."""
    search, counts = _Search(section, 2), dict(runs)  # a granule of 2: every run has an even number of bytes
    return float(search.costs(np.array([counts.get(name, 0) // 2 for name in PATTERNS])))


def allocate_rows(sections: Sequence[Section], budget: int, *, granule: int = GRANULE) -> list[Runs]:
    """Allocate a byte budget per token over the sections of all layers' rows; return the runs of each section.

    ``granule`` divides the bytes of every run. Raises ValueError: the budget is less than the minima of the sections.
    """
    if (least := granule * sum(section.least for section in sections)) > budget:
        raise ValueError(f"{budget} bytes per token are below the minimum of {least}")
    searches = [_Search(section, granule) for section in sections]
    largest = max(float(section.energies.max()) for section in sections if len(section.energies)) or 1.0
    low, high = math.log(largest) - 60, math.log(largest) + 10
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        spent = sum(search.settle(math.exp(middle)) for search in searches)
        low, high = (middle, high) if spent > budget else (low, middle)
    _take_back(searches, sum(search.settle(math.exp(high)) for search in searches) - budget, granule)
    _spend_rest(searches, budget - sum(search.bytes for search in searches), granule)
    return [search.runs() for search in searches]


def _take_back(searches: list[_Search], excess: int, granule: int) -> None:
    """Take back the bytes beyond the budget, granule by granule, at the least cost."""
    changes = [search.changes(-1) for search in searches]
    while excess > 0:
        _step(searches, changes, -1)
        excess -= granule


def _spend_rest(searches: list[_Search], rest: int, granule: int) -> None:
    """Spend the remaining bytes, granule by granule, at the largest gain."""
    changes = [search.changes(1) for search in searches]
    while rest >= granule and min(cost for cost, _ in changes) < 0:
        _step(searches, changes, 1)
        rest -= granule


def _step(searches: list[_Search], changes: list[tuple[float, np.ndarray]], sign: int) -> None:
    """Make the cheapest change, and recompute the next change of its section."""
    cheapest = min(range(len(changes)), key=lambda each: changes[each][0])
    searches[cheapest].counts = changes[cheapest][1]
    changes[cheapest] = searches[cheapest].changes(sign)


def unit_order(runs: Runs, unit: int = 1) -> list[int]:
    """Return, for each unit in row order, its index by descending energy.

    The widest fields hold the units of the most energy, wherever they are in the row.
    """
    widths = [bits for name, count in runs for bits in PATTERNS[name] for _ in range(count // unit)]
    by_width = sorted(range(len(widths)), key=lambda index: -widths[index])
    order = [0] * len(widths)
    for rank, index in enumerate(by_width):
        order[index] = rank
    return order
