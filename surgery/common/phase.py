"""One phase of long work: its progress, duration and peak memory."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable

import psutil

from surgery.common.human import duration, size

SAMPLED_EVERY, TOLD_EVERY = 0.1, 60.0
"""Seconds between memory samples, and between progress lines of a long phase."""


def resident_memory() -> int:
    """Return the current resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def peak_memory() -> int:
    """Return the peak resident memory of this process so far in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Phase:
    """Phase that a background thread monitors from construction until :meth:`end`.

    ``done`` and ``total``, None if unknown, are in units. ``peak_bytes`` is the peak resident memory during the phase:
    exact if it is a new maximum of the process, otherwise the largest sample.
    """

    def __init__(self, name: str, total: int | None, unit: str, going: Callable[[Phase], None]):
        """Args: ``going`` is called from the background thread every minute."""
        self.name, self.total, self.unit, self.done = name, total, unit, 0
        self._began, self._most_before = time.perf_counter(), peak_memory()
        self.peak_bytes = resident_memory()
        self._going, self._ended = going, threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"phase {name}", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        """Elapsed time, or the duration of a phase that has ended."""
        return self._took if self._ended.is_set() else time.perf_counter() - self._began

    def end(self) -> None:
        """Stop the clock and the memory samples."""
        self._took = time.perf_counter() - self._began
        self._ended.set()
        self._thread.join()
        peak = peak_memory()
        self.peak_bytes = peak if peak > self._most_before else max(self.peak_bytes, resident_memory())

    def _watch(self) -> None:
        last = self._began
        while not self._ended.wait(SAMPLED_EVERY):
            self.peak_bytes = max(self.peak_bytes, resident_memory())
            if time.perf_counter() - last >= TOLD_EVERY:
                last = time.perf_counter()
                self._going(self)

    def amount(self) -> str:
        """Format the progress: ``12 of 30 layers``, ``30 layers``, ``1.2 of 3.4 GiB``."""
        if self.unit == "B":
            of = "" if self.total in (None, self.done) else f" of {size(self.total)}"
            return size(self.done) + of
        of = "" if self.total in (None, self.done) else f" of {self.total:,}"
        return f"{self.done:,}{of} {_plural(self.unit, self.total if of else self.done)}"

    def left(self, already: int) -> float | None:
        """Estimate the remaining seconds from the pace so far; None if unknown. ``already`` done units took no time."""
        if self.total is None or self.done <= already:
            return None
        return self.seconds * (self.total - self.done) / (self.done - already)

    def progress_text(self) -> str:
        """Format the line for progress; the next methods format the lines for the end and an interruption."""
        return f"{self.name}: {self.amount()} after {duration(self.seconds)}"

    def end_text(self, *, memory: bool) -> str:
        took = f"{self.name}: {self.amount()} in {duration(self.seconds)}"
        return f"{took}, {size(self.peak_bytes)} at most" if memory else took

    def stop_text(self) -> str:
        return f"{self.name}: stopped at {self.amount()} after {duration(self.seconds)}"


def _plural(unit: str, count: int | None) -> str:
    return unit if count == 1 else f"{unit}es" if unit.endswith("ch") else f"{unit}s"
