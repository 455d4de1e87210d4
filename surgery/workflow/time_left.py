"""How long the steps behind the one at work will take, as far as it can be told at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surgery.common.errors import SurgeryError
from surgery.workflow.steps import Action, Finished


class TimeLeft:
    """Expects every step of a recipe, and learns from those that are done how far off that is.

    Args:
        actions, places: of all steps, and of their outputs.
    """

    def __init__(self, actions: Sequence[Action], places: Sequence[Path]):
        self._actions, self._places = actions, places
        self._expected: dict[int, float] = {}
        self._spent = self._foreseen = 0.0  # of steps that were expected and are done

    def after(self, step: int, finished: Finished) -> float | None:
        """Seconds of the steps behind one that begins, by its number from 0; None where one of them cannot be told."""
        self._of_step(step, finished)
        found = 0.0
        for later in reversed(range(step + 1, len(self._actions))):  # what cannot be told is the last, mostly
            if (seconds := self._of_step(later, finished)) is None:
                return None
            found += seconds
        return found * self._spent / self._foreseen if self._foreseen else found

    def done(self, step: int, seconds: float) -> None:
        """A step took so long."""
        if expected := self._expected.get(step):
            self._spent += seconds
            self._foreseen += expected

    def _of_step(self, step: int, finished: Finished) -> float | None:
        if step not in self._expected:
            try:
                seconds = self._actions[step].seconds(self._places[step], finished)
            except SurgeryError:  # of what is still to be made; or the step says it once it begins
                seconds = None
            if seconds is None:
                return None
            self._expected[step] = seconds
        return self._expected[step]
