"""Query positions that a fit samples, in blocks, and sums over them that several processes share.

Sequences are dealt out as those of the calibration are (:mod:`surgery.calibration.parts`): sums are of parts of them,
added in their order, so that they have the same bits on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from surgery.calibration.parts import Parts

BLOCKS = 4
"""Per sequence; more save little and cost calls."""

Item = TypeVar("Item")
Made = TypeVar("Made")
Sum = TypeVar("Sum", float, Tensor, list[Tensor])


class Place(NamedTuple):
    """Ascending query positions [M] of one sequence; what the fit is about them."""

    number: int
    sequence: int
    positions: Tensor


class Blocks(Generic[Item]):
    """Something of each block: of those of this process's sequences, one after the other.

    Args:
        parts: of the sequences.
        places: of all blocks, by their part.
        items: of the blocks of this process's parts, in the same order.
        keep: whether what is made of items is kept; else it is made again whenever it is used, so that one at a time is
            in memory.
    """

    def __init__(
        self, parts: Parts, places: Mapping[int, Sequence[Place]], items: Mapping[int, Sequence[Item]], keep: bool
    ):
        self._parts, self._places, self._items, self._keep = parts, places, items, keep

    def map(self, make: Callable[..., Made], *others: Blocks) -> Blocks[Made]:
        """What ``make`` gives of each item, and of the other ones' of the same block."""
        of = (lambda *columns: list(map(make, *columns))) if self._keep else partial(Anew, make)
        made = {part: of(*(blocks._items[part] for blocks in (self, *others))) for part in self._parts.own}
        return Blocks(self._parts, self._places, made, self._keep)

    def total(self, function: Callable[..., Sum], *others: Blocks, every: int = 1) -> Sum:
        """The sum of a number, tensor or list of tensors of each item, on every process.

        Args:
            every: one block in so many is asked.
        """

        def of_part(part: int) -> Sum:
            asked = [index for index, place in enumerate(self._places[part]) if place.number % every == 0]
            columns = [blocks._items[part] for blocks in (self, *others)]
            return _sum(function(*(column[index] for column in columns)) for index in asked)

        return self.total_of_parts(of_part)

    def total_of_parts(self, function: Callable[[int], Sum]) -> Sum:
        """The same of what a function gives of every part, by its number."""
        processes, device = self._parts.processes, self._device
        if processes.count == 1:
            return _sum(map(function, range(self._parts.count)))
        found = processes.in_turn(lambda part: _to(function(part), "cpu"), range(self._parts.count))
        return _to(_sum(found), device)

    def agreed(self, make: Callable[[], Tensor]) -> Tensor:
        """A tensor as the main process makes it, on every process."""
        processes = self._parts.processes
        return make() if processes.count == 1 else processes.from_main(lambda: make().cpu()).to(self._device)

    def items(self, part: int) -> Sequence[Item]:
        """Those of a part of this process."""
        return self._items[part]

    def generators(self, width: int, seed: int) -> dict[int, torch.Generator]:
        """For Gaussian numbers [M, width] of every block in turn, one for each part, as one for all would draw them."""
        one, found = torch.Generator().manual_seed(seed), {}
        for part, places in self._places.items():
            found[part] = one.clone_state()
            for place in places:
                torch.randn(len(place.positions), width, generator=one)
        return found

    @property
    def _device(self) -> torch.device:
        return self._places[0][0].positions.device


class Anew(Sequence):
    """What a function makes of items of the same place, made again whenever it is asked for."""

    def __init__(self, make: Callable, *columns: Sequence):
        self._make, self._columns = make, columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int):
        return self._make(*(column[index] for column in self._columns))


def sample_blocks(
    parts: Parts, shape: Sequence[int], queries: int, generator: torch.Generator, device: torch.device, *, keep: bool
) -> Blocks[Place]:
    """Random query positions of every sequence, in blocks of neighbours so that early ones meet few keys.

    Args:
        parts: of the sequences, of one each batch.
        shape: numbers of sequences and of tokens of each.
        queries: positions of a sequence.
        keep: of :class:`Blocks`.
    """
    sequences, tokens = shape
    drawn = []
    for sequence in range(sequences):
        positions = torch.randperm(tokens, generator=generator)[:queries].sort().values.to(device)
        drawn += [(sequence, block) for block in positions.chunk(BLOCKS)]
    places = [Place(number, *block) for number, block in enumerate(drawn)]
    of_parts = {}
    for part in range(parts.count):
        rows = parts.rows(part)
        of_parts[part] = [place for place in places if rows.start <= place.sequence < rows.stop]
    return Blocks(parts, of_parts, of_parts, keep)


def _sum(found):
    """Numbers, tensors or lists of them, added in their order."""
    return reduce(_plus, found, 0.0)


def _plus(one, other):
    if isinstance(other, list):
        return [a + b for a, b in zip(one, other, strict=True)] if one else other
    return one + other


def _to(found, device):
    if isinstance(found, list):
        return [tensor.to(device) for tensor in found]
    return found.to(device) if isinstance(found, Tensor) else found
