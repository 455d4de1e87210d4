"""Which KV heads to merge with which: the partition into groups of one size that costs least."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product
from math import comb, prod

Group = tuple[int, ...]

# Eight heads in pairs are 105 partitions of 28 groups, in fours 35 of 70: all of them can be tried.
EXACT_PARTITIONS = 105


def adjacent_groups(heads: int, size: int) -> tuple[Group, ...]:
    """Neighbours together, as checkpoints number their heads: ``((0, 1), (2, 3), ...)``."""
    return tuple(tuple(range(first, first + size)) for first in range(0, heads, size))


def cheapest_groups(heads: int, size: int, cost: Callable[[Group], float]) -> tuple[Group, ...]:
    """The partition of ``range(heads)`` into groups of ``size`` with the least sum of costs.

    Few heads: every partition is tried. Many: the cost of a group is taken for the sum over its pairs (the cost itself
    where groups are pairs), groups are filled greedily, and heads of two groups change places as long as that helps.
    Then the result is no worse than neighbours in those terms, and not always the best.

    Args:
        cost: of merging an ascending group; asked once for each.

    Returns:
        Ascending groups, ordered by their first head.

    Raises:
        ValueError: the size does not divide the heads.
    """
    if size < 1 or heads % size:
        raise ValueError(f"{heads} heads do not divide into groups of {size}")
    if size == 1:
        return adjacent_groups(heads, 1)
    known = cache(cost)
    if partition_count(heads, size) <= EXACT_PARTITIONS:
        return min(partitions(tuple(range(heads)), size), key=lambda groups: sum(map(known, groups)))
    pair_cost = {pair: known(pair) for pair in combinations(range(heads), 2)}

    def summed(group: Group) -> float:
        return sum(pair_cost[pair] for pair in combinations(sorted(group), 2))

    starts = (_greedy(heads, size, summed), adjacent_groups(heads, size))
    improved = [_swapped(list(start), summed) for start in starts]
    best = min(improved, key=lambda groups: sum(map(summed, groups)))
    return tuple(sorted(tuple(sorted(group)) for group in best))


def partition_count(heads: int, size: int) -> int:
    """Number of partitions of so many heads into groups of one size."""
    return prod(comb(rest - 1, size - 1) for rest in range(heads, 0, -size))


def partitions(heads: Group, size: int) -> Iterator[tuple[Group, ...]]:
    """All partitions of ``heads`` into groups of one size, each once."""
    if not heads:
        yield ()
        return
    first, rest = heads[0], heads[1:]
    for others in combinations(rest, size - 1):
        remaining = tuple(head for head in rest if head not in others)
        for tail in partitions(remaining, size):
            yield ((first, *others), *tail)


def _greedy(heads: int, size: int, cost: Callable[[Group], float]) -> tuple[Group, ...]:
    """Fills one group after the other: the cheapest pair that is left, then what adds least to it."""
    left, groups = set(range(heads)), []
    while left:
        group = min(combinations(sorted(left), 2), key=cost)
        left -= set(group)
        while len(group) < size:
            head = min(sorted(left), key=lambda head: cost((*group, head)))
            group = (*group, head)
            left.remove(head)
        groups.append(group)
    return tuple(groups)


def _swapped(groups: list[Group], cost: Callable[[Group], float]) -> list[Group]:
    """Exchanges heads between two groups until no exchange helps."""
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(groups)), 2):
            for i, j in product(range(len(groups[a])), repeat=2):
                first, second = list(groups[a]), list(groups[b])
                first[i], second[j] = second[j], first[i]
                before = cost(groups[a]) + cost(groups[b])
                # A margin: rounding must not make two exchanges follow each other forever.
                if cost(tuple(first)) + cost(tuple(second)) < before * (1 - 1e-9):
                    groups[a], groups[b], improved = tuple(first), tuple(second), True
    return groups
