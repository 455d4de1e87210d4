"""Row ranges of a stored tensor that are read as a separate tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """Row ranges of a stored tensor.

    Attributes:
        runs: row ranges [start, stop), in the order in which they are read.
        transposed: whether the matrix is stored transposed, with these rows as columns.
    """

    runs: tuple[tuple[int, int], ...]
    transposed: bool = False

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.runs)
