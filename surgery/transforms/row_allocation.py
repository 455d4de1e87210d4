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


class _Search:
    """Finds the runs of least cost of one section, at any price."""

    def __init__(self, section: Section, granule: int):
        self._sums = [0.0, *section.energies.double().cumsum(0).tolist()]
        self._units = granule // section.unit  # of a field of one granule
        self._granule = granule
        self.least = section.least
        self.counts = [0] * len(PATTERNS)
        self.counts[list(PATTERNS).index("2+2+2+2")] = section.least

    def cost(self, counts: Sequence[int]) -> float:
        """Return Σ λ D of the section with so many granules of each pattern."""
        total, start = self._sums[-1], 0
        for width, units in self._units_of_widths(counts):
            end = min(start + units, len(self._sums) - 1)
            total -= (1 - noise(width)) * (self._sums[end] - self._sums[start])
            start = end
        return total

    def _units_of_widths(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        units = dict.fromkeys(WIDTHS, 0)
        for fields, count in zip(PATTERNS.values(), counts, strict=True):
            for bits in fields:
                units[bits] += count * self._units
        return list(units.items())

    def settle(self, price: float) -> int:
        """Move to runs of least cost at a price of a byte; return their bytes."""
        best = self.cost(self.counts) + price * self.bytes
        moves = [(i, j, size) for size in (4, 1) for i in range(len(self.counts)) for j in range(-1, len(self.counts))]
        moved = True
        while moved:
            moved = False
            for source, target, size in moves:
                for sign in (1, -1):
                    counts = list(self.counts)
                    counts[source] -= sign * size
                    if target >= 0:
                        counts[target] += sign * size
                    if min(counts) < 0 or sum(counts) < self.least:
                        continue
                    cost = self.cost(counts) + price * sum(counts) * self._granule
                    if cost < best * (1 - 1e-12):
                        best, self.counts, moved = cost, counts, True
        return self.bytes

    @property
    def bytes(self) -> int:
        return sum(self.counts) * self._granule

    def runs(self) -> Runs:
        """Return the runs of the present counts."""
        return tuple((name, count * self._granule) for name, count in zip(PATTERNS, self.counts, strict=True) if count)


def row_cost(section: Section, runs: Runs) -> float:
    """Energy that a section still loses in these runs: Σ λ D."""
    search, counts = _Search(section, 2), dict(runs)  # every run has an even number of bytes
    return search.cost([counts.get(name, 0) // 2 for name in PATTERNS])


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
    while excess > 0:
        _, search, counts = min(_changes(searches, -1), key=lambda change: change[0])
        search.counts = counts
        excess -= granule


def _spend(searches: list[_Search], rest: int, granule: int) -> None:
    """Spend what the last price leaves, granule by granule, where it gains most."""
    while rest >= granule:
        cost, search, counts = min(_changes(searches, 1), key=lambda change: change[0])
        if cost >= 0:
            return
        search.counts = counts
        rest -= granule


def _changes(searches: list[_Search], sign: int) -> list[tuple[float, _Search, list[int]]]:
    """Return every step of one granule: its cost, and the counts of the section that it changes."""
    changes = []
    for search in searches:
        now = search.cost(search.counts)
        for pattern in range(len(PATTERNS)):
            counts = list(search.counts)
            counts[pattern] += sign
            if counts[pattern] >= 0 and sum(counts) >= search.least:
                changes.append((search.cost(counts) - now, search, counts))
    return changes


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
