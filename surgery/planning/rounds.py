"""Measures candidates in rounds, so that text is spent where it decides something.

All of them are measured on a quarter of it; those that are not far behind one that is no larger on another quarter; and
those between which the choice lies on the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surgery.calibration.held_out import HeldOut
from surgery.planning.candidates import Sized
from surgery.planning.measure import Carried, Scored
from surgery.planning.rows import Row, contenders, far_behind

Scores = list[tuple[Scored, Scored]]
"""Of candidates, each beside the source's on the same texts."""


class Rounds:
    """Candidates and what became of them.

    Args:
        held_out: text and prompts of all rounds.
        measure: candidates on a part of it; it is told how many tokens of theirs may follow.
        told: rows of candidates and their scores, in the order given.
    """

    def __init__(
        self,
        held_out: HeldOut,
        measure: Callable[[Sequence[Sized], HeldOut, int], Carried],
        told: Callable[[Sequence[Sized], Scores], list[Row]],
    ):
        first, self._last = held_out.split(-(-held_out.texts // 2))
        self._first, self._second = first.split(-(-first.texts // 2))
        self._measure, self._told = measure, told
        self.tried: list[Sized] = []
        self.scores: Scores = []

    def rows(self) -> list[Row]:
        """Of all that were tried, in that order."""
        return self._told(self.tried, self.scores)

    def add(self, candidates: Sequence[Sized]) -> None:
        """Measures more candidates in the first two rounds."""
        places = range(len(self.tried), len(self.tried) + len(candidates))
        self.tried += candidates
        self._go_on(places, self._first, self._second, self._last)
        behind = far_behind(self.rows())
        self._go_on([place for place in places if place not in behind], self._second, self._last)

    def decide(self, share: float | None, max_loss: float | None) -> None:
        """Measures those between which the choice lies in the last round."""
        self._go_on(contenders(self.rows(), share, max_loss), self._last)

    def _go_on(self, places: Sequence[int], part: HeldOut, *parts: HeldOut) -> None:
        """Measures some on a part; at most these, and the source, go on to the parts behind it."""
        if not places or not part.texts:
            return
        later = (1 + len(places)) * sum(each.tokens.numel() for each in parts)
        carried = self._measure([self.tried[place] for place in places], part, later)
        for place, score in zip(places, carried.scored, strict=True):
            if place == len(self.scores):
                self.scores.append((score, carried.source))
            else:
                own, source = self.scores[place]
                self.scores[place] = own.with_more(score), source.with_more(carried.source)
