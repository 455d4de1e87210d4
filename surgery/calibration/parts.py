"""Distribution of calibration sequences over processes, for sums that do not depend on the number of processes.

Sequences are split into parts of whole batches, which processes take in turn. Each part is summed separately, and sums
of parts are added in order. One process does the same, so that its sums are bit-identical to those of several.
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
"""Maximum number of parts, and of processes with work. Per part, a matrix of each moment is sent to all processes."""


class Parts:
    """Parts of the calibration sequences, of batches that processes share.

    ``count`` parts in all, the indices of this process's own, and its number of sequences.
    """

    def __init__(self, sequences: int, batch_size: int, processes: Processes = ALONE):
        batches = [slice(start, min(start + batch_size, sequences)) for start in range(0, sequences, batch_size)]
        self.processes, self.count = processes, min(PARTS, len(batches))
        ends = [len(batches) * part // self.count for part in range(self.count + 1)]
        self._batches = [batches[begin:end] for begin, end in pairwise(ends)]
        self.own = range(processes.rank, self.count, processes.count)
        self.num_local, self._before = 0, {}  # _before: sequences of other processes before a part
        for part in self.own:
            rows = self.rows(part)
            self._before[part] = rows.start - self.num_local
            self.num_local += rows.stop - rows.start

    def rows(self, part: int) -> slice:
        """Return the rows of a part among all sequences."""
        return slice(self._batches[part][0].start, self._batches[part][-1].stop)

    def own_rows(self, part: int) -> slice:
        """Return the rows of a part among this process's sequences."""
        rows, before = self.rows(part), self._before[part]
        return slice(rows.start - before, rows.stop - before)

    def batches(self, part: int) -> Iterator[tuple[slice, slice]]:
        """Yield the batches of a part, as rows among all sequences and among this process's."""
        before = self._before[part]
        for rows in self._batches[part]:
            yield rows, slice(rows.start - before, rows.stop - before)

    def pick(self, tensor: Tensor, memory: ActivationMemory) -> Tensor:
        """Copy this process's rows of a tensor [N, ...]."""
        picked = memory.empty((self.num_local, *tensor.shape[1:]), tensor.dtype, tensor.device)
        for part in self.own:
            for rows, own in self.batches(part):
                picked[own] = tensor[rows]
                give_back(picked, tensor)
        return picked

    def gather(self, own: Tensor, sequences: Sequence[int]) -> Tensor:
        """Gather selected sequences, in order, on every process, from the rows [n, ...] of each process."""

        def rows_of(part: int) -> list[Tensor]:
            rows, begin = self.rows(part), self.own_rows(part).start
            return [own[begin + each - rows.start] for each in sequences if rows.start <= each < rows.stop]

        results = self.processes.map(rows_of, range(self.count))
        return torch.stack([sequence for part in results for sequence in part])

    def whole(self, own: Tensor) -> Tensor | None:
        """Gather the rows [N, ...] of all processes on the main one; None on the rest."""
        if self.processes.count == 1:
            return own
        parts = self.processes.in_turn(lambda part: own[self.own_rows(part)].cpu(), range(self.count))
        on_main = [rows for rows in parts if self.processes.is_main]
        return torch.cat(on_main) if on_main else None

    def take(self, snapshots: Snapshots, loop: str, state: Callable[[], dict]) -> None:
        """Save a state on the main process if a snapshot is due; all processes must call this to build it."""
        if self.processes.from_main(snapshots.due):
            value = state()
            self.processes.from_main(lambda: snapshots.take(loop, lambda: value))
