"""Row ranges of a stored tensor that are read as a separate tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """Row ranges [start, stop) of a stored tensor, in order; of a transposed one, these rows are columns."""

    runs: tuple[tuple[int, int], ...]
    transposed: bool = False

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.runs)
