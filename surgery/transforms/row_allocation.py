"""Spends one budget of bytes over packed rows: how many values every layer caches of a token, and in how many bits.

To second order a channel of energy λ (its share of the loss) costs λ if it is dropped and ``λ D(b)`` in b bits, with D
the noise of a uniform quantizer relative to the variance. Under a budget the best choice has one price for all bits:
reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3). Rows consist of runs of bytes of one
pattern (:mod:`surgery.model.token_format`), in steps of :data:`GRANULE` bytes, so each section of a row is searched for
the runs of least ``Σ λ D(b) + price · bytes``; the price is bisected.
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
"""Bytes of a run are a multiple of this, what a GPU loads at once; small models take less, see `granule_of`."""
WIDTHS = (8, 5, 4, 3, 2, 1)
BISECTIONS = 40


@cache
def noise(bits: int) -> float:
    """Mean squared error of the best uniform quantizer of 2^bits levels, of a normal value of variance one."""
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
    """Return the granule for a source that caches `width` values of a token and layer: 16 bytes from 1,024 values on.

    A granule of 16 would take an eighth of the row of a small model. Chosen on the demo model alone, where 4 lost less
    at an eighth of the bytes; not compared on SmolLM2-135M.
    """
    return GRANULE if width >= 1024 else 4


@dataclass(frozen=True)
class Section:
    """A part of a row whose channels are sorted by energy.

    Attributes:
        energies: descending, of each unit; comparable between all sections that share a budget.
        unit: channels of a unit, which share their bits: 1, or 2 for complex components.
        least: granules that it has at least.
    """

    energies: Tensor
    unit: int = 1
    least: int = 0


FIELDS = np.array([[fields.count(width) for fields in PATTERNS.values()] for width in WIDTHS])
"""Fields of each width in a byte of each pattern."""
MOVES = np.array(
    [
        [sign * size * ((place == target) - (place == source)) for place in range(len(PATTERNS))]
        for size in (4, 1)
        for source in range(len(PATTERNS))
        for target in range(-1, len(PATTERNS))
        for sign in (1, -1)
    ]
)
"""Granules that go from one pattern to another, or from and to nowhere, in the order in which they are tried."""


class _Search:
    """Finds the runs of least cost of one section, at any price."""

    def __init__(self, section: Section, granule: int):
        self._sums = np.array([0.0, *section.energies.double().cumsum(0).tolist()])
        self._units = granule // section.unit  # of a field of one granule
        self._granule = granule
        self.least = section.least
        self.counts = np.zeros(len(PATTERNS), dtype=np.int64)
        self.counts[list(PATTERNS).index("2+2+2+2")] = section.least

    def costs(self, counts: np.ndarray) -> np.ndarray:
        """Return Σ λ D of the section with so many granules of each pattern, [..., patterns] → [...]."""
        ends = np.minimum((counts @ FIELDS.T * self._units).cumsum(-1), len(self._sums) - 1)
        total, before = self._sums[-1], 0.0
        for place, width in enumerate(WIDTHS):
            reached = self._sums[ends[..., place]]
            total = total - (1 - noise(width)) * (reached - before)
            before = reached
        return total

    def settle(self, price: float) -> int:
        """Move to runs of least cost at a price of a byte; return their bytes."""
        best = float(self.costs(self.counts)) + price * self.bytes
        begin = 0  # the next move to try
        while True:
            counts = self.counts + MOVES
            costs = self.costs(np.maximum(counts, 0)) + price * (counts.sum(-1) * self._granule)
            better = self._possible(counts) & (costs < best * (1 - 1e-12))
            place = next(iter(np.flatnonzero(better[begin:])), None)
            if place is None and begin:
                place, begin = next(iter(np.flatnonzero(better)), None), 0
            if place is None:
                return self.bytes
            place += begin
            best, self.counts, begin = float(costs[place]), counts[place], (place + 1) % len(MOVES)

    def changes(self, sign: int) -> tuple[float, np.ndarray]:
        """Return what the cheapest step of one granule costs, and the counts after it; infinity if there is none."""
        counts = self.counts + sign * np.eye(len(PATTERNS), dtype=np.int64)
        costs = self.costs(np.maximum(counts, 0)) - self.costs(self.counts)
        costs = np.where(self._possible(counts), costs, np.inf)
        place = int(costs.argmin())
        return float(costs[place]), counts[place]

    def _possible(self, counts: np.ndarray) -> np.ndarray:
        return (counts.min(-1) >= 0) & (counts.sum(-1) >= self.least)

    @property
    def bytes(self) -> int:
        return int(self.counts.sum()) * self._granule

    def runs(self) -> Runs:
        """Return the runs of the present counts."""
        counts = self.counts.tolist()
        return tuple((name, count * self._granule) for name, count in zip(PATTERNS, counts, strict=True) if count)


def row_cost(section: Section, runs: Runs) -> float:
    """Energy that a section still loses in these runs: Σ λ D."""
    search, counts = _Search(section, 2), dict(runs)  # every run has an even number of bytes
    return float(search.costs(np.array([counts.get(name, 0) // 2 for name in PATTERNS])))


def allocate_rows(sections: Sequence[Section], budget: int, *, granule: int = GRANULE) -> list[Runs]:
    """Spend a budget over the sections of all layers' rows; return the runs of each.

    Args:
        budget: bytes per token in all sections together.
        granule: bytes of which every run is a multiple.

    Raises:
        ValueError: the budget is less than the least.
    """
    if (least := granule * sum(section.least for section in sections)) > budget:
        raise ValueError(f"{budget} bytes per token are fewer than the least, {least}")
    searches = [_Search(section, granule) for section in sections]
    largest = max(float(section.energies.max()) for section in sections if len(section.energies)) or 1.0
    low, high = math.log(largest) - 60, math.log(largest) + 10
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        spent = sum(search.settle(math.exp(middle)) for search in searches)
        low, high = (middle, high) if spent > budget else (low, middle)
    _save(searches, sum(search.settle(math.exp(high)) for search in searches) - budget, granule)
    _spend(searches, budget - sum(search.bytes for search in searches), granule)
    return [search.runs() for search in searches]


def _save(searches: list[_Search], excess: int, granule: int) -> None:
    """Take back what the last price spent beyond the budget, granule by granule, where it costs least."""
    changes = [search.changes(-1) for search in searches]
    while excess > 0:
        _step(searches, changes, -1)
        excess -= granule


def _spend(searches: list[_Search], rest: int, granule: int) -> None:
    """Spend what the last price leaves, granule by granule, where it gains most."""
    changes = [search.changes(1) for search in searches]
    while rest >= granule and min(cost for cost, _ in changes) < 0:
        _step(searches, changes, 1)
        rest -= granule


def _step(searches: list[_Search], changes: list[tuple[float, np.ndarray]], sign: int) -> None:
    """Make the cheapest change, and find that section's next."""
    place = min(range(len(changes)), key=lambda each: changes[each][0])
    searches[place].counts = changes[place][1]
    changes[place] = searches[place].changes(sign)


def unit_order(runs: Runs, unit: int = 1) -> list[int]:
    """Return which unit of a section, by descending energy, each unit of its runs is.

    Wide fields hold the units of most energy, wherever in the row they lie.
    """
    widths = [bits for name, count in runs for bits in PATTERNS[name] for _ in range(count // unit)]
    by_width = sorted(range(len(widths)), key=lambda place: -widths[place])
    order = [0] * len(widths)
    for rank, place in enumerate(by_width):
        order[place] = rank
    return order
