"""Views of a stored tensor's rows as a tensor of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """Rows of a stored tensor.

    Attributes:
        runs: ranges [start, stop) of them, in the order in which they are read.
        transposed: whether they are columns of the matrix as it is stored.
    """

    runs: tuple[tuple[int, int], ...]
    transposed: bool = False

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.runs)
