"""Progress of long work on standard error: one bar a phase, or plain lines; silent when asked.

Bars are for people before a terminal. Elsewhere, or where more is wanted (`VERBOSE`), a phase is a line at its end, and
one every minute while it lasts.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime

from tqdm import tqdm

from surgery.common.human import duration
from surgery.common.phase import Phase
from surgery.common.visible import visible

QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""The environment in which neither we nor other packages show bars and notes, in this process and those it starts."""
VERBOSE = "SURGERY_VERBOSE"
"""Environment variable by which lines with times and memory take the place of bars, in processes of a verb too."""


class Progress:
    """Names the phases of long work and remembers how long each took.

    Attributes:
        seconds: wall-clock seconds of every finished phase, in order.
        peaks: the most resident memory during each, in bytes.
    """

    def __init__(self, *, silent: bool = False, places: tuple[str, ...] = ()):
        """Args: ``places`` of all phases in work that they are part of (:meth:`at`)."""
        self._silent, self._places = silent, places
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def fresh(self) -> Progress:
        """Another one that shows as much and has no phases behind it, for the next of several pieces of work."""
        return Progress(silent=self._silent, places=self._places)

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Phases of the block are told with their place in the whole, such as ``3 of 5``."""
        before, self._places = self._places, (*self._places, place)
        try:
            yield
        finally:
            self._places = before

    def step(self, number: int, of: int) -> contextlib.AbstractContextManager[None]:
        """The same for one of several steps whose number is known."""
        return self.at(f"{number} of {of}")

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None, unit: str = "layer") -> Iterator[Callable[..., None]]:
        """Yields a function that advances the phase's bar by one unit, or by as many as it is given.

        ``total`` is None where nobody knows.
        """
        place, already = ", ".join(self._places), 0
        lines, verbose = self._shown and (_is_verbose() or not sys.stderr.isatty()), _is_verbose()

        def tell(text: str) -> None:
            if lines:
                self._show(f"{place}: {text}" if place else text)

        def going(phase: Phase) -> None:
            left = phase.left(already)
            tell(phase.goes_on() + (f", about {duration(left)} left" if left else ""))

        bar = tqdm(
            total=total,
            desc=f"{visible(f'{place} {name}').strip():<32}",
            unit=unit,
            unit_scale=unit == "B",
            file=sys.stderr,
            disable=lines or not self._shown,
        )
        phase = Phase(name, total, unit, going)
        if verbose:
            tell(f"{name} …")

        def advance(count: int = 1) -> None:
            nonlocal already
            if not phase.done and count > 1:
                already = count  # what an earlier run had done comes at once
            phase.done += count
            bar.update(count)

        try:
            with bar:
                yield advance
        except BaseException:
            phase.end()
            if verbose:
                tell(phase.stopped())
            raise
        phase.end()
        tell(phase.ended(memory=verbose))
        self.seconds[name] = self.seconds.get(name, 0.0) + phase.seconds
        self.peaks[name] = max(self.peaks.get(name, 0), phase.peak_bytes)

    def note(self, text: str) -> None:
        """A line between phases."""
        if self._shown:
            self._show(text)

    @property
    def _shown(self) -> bool:
        return not (self._silent or os.environ.get("TQDM_DISABLE"))

    @staticmethod
    def _show(text: str) -> None:
        stamp = f"{datetime.now():%H:%M:%S} " if _is_verbose() else ""
        tqdm.write(stamp + visible(text), file=sys.stderr)  # past the bars of other libraries


def _is_verbose() -> bool:
    return VERBOSE in os.environ
