"""Measurement of candidates in rounds, which spends most of the held-out text on the best ones.

All candidates are measured on the first quarter of the text, those that are not `rows.clearly_worse` on the second
quarter, and the contenders for the choice on the other half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from surgery.calibration.held_out import HeldOut
from surgery.planning.engine_formats import Weighed
from surgery.planning.measure import Carried, Scored
from surgery.planning.rows import Row, clearly_worse, contenders

Scores = list[tuple[Scored, Scored]]
"""Scores of candidates, each paired with the source's on the same texts."""


class Rounds:
    """Candidates and their scores over all rounds.

    ``measure`` measures candidates on a part of ``held_out``, ``rows_of`` builds rows in order. ``share`` is the
    budget, None for a loss. Candidates whose loss is not finite are added to ``refused``.
    """

    def __init__(
        self,
        held_out: HeldOut,
        measure: Callable[[Sequence[Weighed], HeldOut], Carried],
        rows_of: Callable[[Sequence[Weighed], Scores], list[Row]],
        share: float | None,
        refused: dict[str, str],
    ):
        first, self._last = held_out.split(-(-held_out.texts // 2))
        self._first, self._second = first.split(-(-first.texts // 2))
        self._measure, self._rows_of, self._share, self._refused = measure, rows_of, share, refused
        self.weighed: list[Weighed] = []
        self.scores: Scores = []

    def rows(self) -> list[Row]:
        """Return the rows of all measured candidates, in the order of their addition."""
        return self._rows_of(self.weighed, self.scores)

    def add(self, candidates: Sequence[Weighed], *, twice: bool = True) -> None:
        """Measure more candidates in the first round, and those that are not clearly worse in the second.

        Args:
            twice: whether candidates above the budget, which cannot be chosen, enter the second round, too.
        """
        start = len(self.weighed)
        self.weighed += candidates
        self._measure_on(range(start, len(self.weighed)), self._first)
        rows = self.rows()
        worse = clearly_worse(rows, self._share)
        new = range(start, len(rows))
        due = [index for index in new if index not in worse and (twice or rows[index].fits_share(self._share))]
        self._measure_on(due, self._second)

    def decide(self, max_loss: float | None) -> None:
        """Measure the contenders for the choice in the last round."""
        self._measure_on(contenders(self.rows(), self._share, max_loss), self._last)

    def _measure_on(self, indices: Sequence[int], part: HeldOut) -> None:
        """Measure the candidates at ``indices`` on a part of the text, merge the scores, and drop non-finite ones."""
        if not indices or not part.texts:
            return
        carried = self._measure([self.weighed[index] for index in indices], part)
        for index, score in zip(indices, carried.scored, strict=True):
            if index == len(self.scores):
                self.scores.append((score, carried.source))
            else:
                own, source = self.scores[index]
                self.scores[index] = own.merge_with(score), source.merge_with(carried.source)
        for index in reversed(indices):
            if not all(map(math.isfinite, self.scores[index][0].losses)):
                self._refused[self.weighed[index].name] = "failed: its loss is not finite"
                del self.weighed[index], self.scores[index]
