"""Progress of long work on standard error: one bar per phase, or plain lines, or silence.

Bars appear on terminals. Otherwise, and with --verbose, a phase prints a line at its end and one every minute while it
lasts.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from tqdm import tqdm

from surgery.common.human import duration
from surgery.common.phase import Phase
from surgery.common.visible import visible

QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
"""Environment variables that silence the bars and notes of this program, other packages and child processes."""

VERBOSE = {"SURGERY_VERBOSE": "1"}
"""Environment variable for lines with times and memory instead of bars, also from child processes."""


class Progress:
    """Reporter of the phases of long work, with the seconds and peak memory of each, in order.

    ``expected`` are amounts of work by phase name, as passed to :meth:`expect`.
    """

    def __init__(self, *, silent: bool = False, positions: tuple[str, ...] = (), is_step: bool = False):
        """Args: ``positions`` are the prefixes of all phases (:meth:`at`); ``is_step`` is set by :meth:`fresh`."""
        self._silent, self._positions, self._is_step = silent, positions, is_step
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self.expected: dict[str, float] = {}
        self._worked = self._spent = 0.0  # in phases whose work was expected

    def fresh(self) -> Progress:
        """Create a reporter with the same settings for the next step; it estimates the time left of its step alone."""
        return Progress(silent=self._silent, positions=self._positions, is_step=True)

    @contextlib.contextmanager
    def at(self, position: str) -> Iterator[None]:
        """Prefix the phases of the block with their position in the whole work, such as ``3 of 5``."""
        before, self._positions = self._positions, (*self._positions, position)
        try:
            yield
        finally:
            self._positions = before

    def expect(self, work: Mapping[str, float]) -> None:
        """Set the amounts of work of the coming phases, in any unit and in order, for estimates of the time left."""
        self.expected = dict(work)

    def step(self, number: int, of: int) -> contextlib.AbstractContextManager[None]:
        """Prefix the phases of the block with the step number: ``3 of 5``."""
        return self.at(f"{number} of {of}")

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None, unit: str = "layer") -> Iterator[Callable[..., None]]:
        """Yield a function that advances the phase by one unit or by a given count; ``total`` is None if unknown."""
        position, already = ", ".join(self._positions), 0
        prefix = f"{position}: " if position else ""
        lines, verbose = self._lines, _is_verbose()

        def show_progress(phase: Phase) -> None:
            if lines:
                estimate = self._time_left(self._left(phase, already), phase.left(already))
                self._show(f"{prefix}{phase.progress_text()}{f', {estimate}' if estimate else ''}")

        bar = tqdm(
            total=total,
            desc=f"{visible(f'{position} {name}').strip():<32}",
            unit=unit,
            unit_scale=unit == "B",
            file=sys.stderr,
            disable=lines or not self._shown or total == 0,
        )
        phase = Phase(name, total, unit, show_progress)
        if lines and verbose:
            self._show(f"{prefix}{name} …")

        def advance(count: int = 1) -> None:
            nonlocal already
            if not phase.done and count > 1:
                already = count  # units of an earlier run are reported at once
            phase.done += count
            if not bar.disable and (remaining := self._left(phase, already)):
                bar.set_postfix_str(self._time_left(remaining, None), refresh=False)
            bar.update(count)

        try:
            with bar:
                yield advance
        except BaseException:
            phase.end()
            if lines and verbose:
                self._show(prefix + phase.stop_text())
            raise
        phase.end()
        if lines and total != 0:
            self._show(prefix + phase.end_text(memory=verbose))
        self._worked += self._work(phase, phase.done - already)
        self._spent += phase.seconds if name in self.expected else 0.0
        self.seconds[name] = self.seconds.get(name, 0.0) + phase.seconds
        self.peaks[name] = max(self.peaks.get(name, 0), phase.peak_bytes)

    def note(self, text: str) -> None:
        """Show a line between phases."""
        if self._shown:
            self._show(text)

    def _work(self, phase: Phase, units: int) -> float:
        return self.expected.get(phase.name, 0.0) * units / phase.total if phase.total else 0.0

    def _left(self, phase: Phase, already: int) -> float | None:
        """Estimate the seconds left for this and the expected later phases from the pace so far; None if unknown."""
        worked = self._worked + self._work(phase, phase.done - already)
        if phase.name not in self.expected or not worked:
            return None
        names = list(self.expected)
        after = sum(self.expected[name] for name in names[names.index(phase.name) + 1 :])
        rest = after + self._work(phase, phase.total - phase.done)
        return rest * (self._spent + phase.seconds) / worked

    def _time_left(self, of_work: float | None, of_phase: float | None) -> str:
        """Format the time left, for all phases if known, else for this phase; empty if unknown."""
        if of_work:
            return f"about {duration(of_work)} left {'of this step' if self._is_step else 'in all'}"
        return f"about {duration(of_phase)} left" if of_phase else ""

    @property
    def _shown(self) -> bool:
        return not (self._silent or os.environ.get("TQDM_DISABLE"))

    @property
    def _lines(self) -> bool:
        return self._shown and (_is_verbose() or not sys.stderr.isatty())

    @staticmethod
    def _show(text: str) -> None:
        stamp = f"{datetime.now():%H:%M:%S} " if _is_verbose() else ""
        tqdm.write(stamp + visible(text), file=sys.stderr)  # does not break the bars of other libraries


def _is_verbose() -> bool:
    return all(name in os.environ for name in VERBOSE)
