"""Measures candidates in rounds, so that text is spent where it decides something.

All of them are measured on a quarter of it; those that are not far behind one that is no larger on another quarter; and
those between which the choice lies on the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surgery.calibration.held_out import HeldOut
from surgery.planning.measure import Carried, Scored
from surgery.planning.rows import Row, contenders, far_behind
from surgery.planning.weighed import Weighed

Scores = list[tuple[Scored, Scored]]
"""Scores of candidates, each next to the source's on the same texts."""


class Rounds:
    """Candidates and what became of them.

    Args:
        held_out: text and prompts of all rounds.
        measure: candidates on a part of it.
        rows_of: rows of candidates and their scores, in the order given.
        share: of the source's bytes, that may be kept; None where a loss is the limit.
    """

    def __init__(
        self,
        held_out: HeldOut,
        measure: Callable[[Sequence[Weighed], HeldOut], Carried],
        rows_of: Callable[[Sequence[Weighed], Scores], list[Row]],
        share: float | None,
    ):
        first, self._last = held_out.split(-(-held_out.texts // 2))
        self._first, self._second = first.split(-(-first.texts // 2))
        self._measure, self._rows_of, self._share = measure, rows_of, share
        self.weighed: list[Weighed] = []
        self.scores: Scores = []

    def rows(self) -> list[Row]:
        """Return the rows of all candidates that were tried, in that order."""
        return self._rows_of(self.weighed, self.scores)

    def add(self, candidates: Sequence[Weighed], *, twice: bool = True) -> None:
        """Measures more candidates.

        Args:
            twice: in the first two rounds; else those that do not keep to the budget, of which none is chosen, in the
                first alone.
        """
        places = range(len(self.weighed), len(self.weighed) + len(candidates))
        self.weighed += candidates
        self._go_on(places, self._first)
        rows = self.rows()
        behind = far_behind(rows, self._share)
        due = [place for place in places if place not in behind and (twice or rows[place].keeps_to(self._share))]
        self._go_on(due, self._second)

    def on_first(self, candidates: Sequence[Weighed]) -> list[Scored]:
        """Measure candidates on the first round's text, without making rows of them."""
        return self._measure(candidates, self._first).scored

    def decide(self, max_loss: float | None) -> None:
        """Measures those between which the choice lies in the last round."""
        self._go_on(contenders(self.rows(), self._share, max_loss), self._last)

    def _go_on(self, places: Sequence[int], part: HeldOut) -> None:
        """Measures some on a part."""
        if not places or not part.texts:
            return
        carried = self._measure([self.weighed[place] for place in places], part)
        for place, score in zip(places, carried.scored, strict=True):
            if place == len(self.scores):
                self.scores.append((score, carried.source))
            else:
                own, source = self.scores[place]
                self.scores[place] = own.with_more(score), source.with_more(carried.source)
