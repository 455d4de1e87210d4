"""Calibration sequences dealt out to processes, for sums over them that do not depend on how many there are.

Sequences are cut into parts of whole batches, which processes take in turn. Every part is summed by itself, and sums of
parts are added in their order; one process does the same, so that its sums are those of several to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from surgery.checkpoint.snapshots import Snapshots
from surgery.running.activations import ActivationMemory, give_back
from surgery.running.processes import ALONE, Processes

PARTS = 8
"""Largest number of parts; more processes have nothing to do. Each is a matrix that is sent to all of them, of every
moment."""


class Parts:
    """Sequences in parts.

    Args:
        sequences: how many there are.
        batch_size: of them at a time.
        processes: that have them.

    Attributes:
        count: of parts.
        own: those of this process.
        num_local: how many sequences this process has.
    """

    def __init__(self, sequences: int, batch_size: int, processes: Processes = ALONE):
        batches = [slice(start, min(start + batch_size, sequences)) for start in range(0, sequences, batch_size)]
        self.processes, self.count = processes, min(PARTS, len(batches))
        ends = [len(batches) * part // self.count for part in range(self.count + 1)]
        self._batches = [batches[begin:end] for begin, end in pairwise(ends)]
        self.own = range(processes.rank, self.count, processes.count)
        self.num_local, self._before = 0, {}  # the latter: sequences of others before a part
        for part in self.own:
            rows = self.rows(part)
            self._before[part] = rows.start - self.num_local
            self.num_local += rows.stop - rows.start

    def rows(self, part: int) -> slice:
        """Sequences of a part, among all."""
        return slice(self._batches[part][0].start, self._batches[part][-1].stop)

    def own_rows(self, part: int) -> slice:
        """Return the rows of a part among those of this process."""
        rows, before = self.rows(part), self._before[part]
        return slice(rows.start - before, rows.stop - before)

    def batches(self, part: int) -> Iterator[tuple[slice, slice]]:
        """Batches of a part of this process, among all sequences and among those that it has."""
        before = self._before[part]
        for rows in self._batches[part]:
            yield rows, slice(rows.start - before, rows.stop - before)

    def pick(self, tensor: Tensor, memory: ActivationMemory) -> Tensor:
        """A copy of those rows of [N, ...] that are this process's."""
        picked = memory.empty((self.num_local, *tensor.shape[1:]), tensor.dtype, tensor.device)
        for part in self.own:
            for rows, own in self.batches(part):
                picked[own] = tensor[rows]
                give_back(picked, tensor)
        return picked

    def gather(self, own: Tensor, sequences: Sequence[int]) -> Tensor:
        """Some sequences of all, in their order, on every process, from the rows [n, ...] that each has."""

        def rows_of(part: int) -> list[Tensor]:
            rows, begin = self.rows(part), self.own_rows(part).start
            return [own[begin + each - rows.start] for each in sequences if rows.start <= each < rows.stop]

        results = self.processes.map(rows_of, range(self.count))
        return torch.stack([sequence for part in results for sequence in part])

    def whole(self, own: Tensor) -> Tensor | None:
        """The rows [N, ...] of all processes, on the main one, from those of each; itself where there is one."""
        if self.processes.count == 1:
            return own
        parts = self.processes.in_turn(lambda part: own[self.own_rows(part)].cpu(), range(self.count))
        on_main = [rows for rows in parts if self.processes.is_main]
        return torch.cat(on_main) if on_main else None

    def take(self, snapshots: Snapshots, loop: str, state: Callable[[], dict]) -> None:
        """Save a state on the main process; all processes take part in making it."""
        if self.processes.from_main(snapshots.due):
            value = state()
            self.processes.from_main(lambda: snapshots.take(loop, lambda: value))
