"""Progress on standard error: one bar a phase, with its time; silent when asked."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

from tqdm import tqdm


class Progress:
    """Names the phases of long work and remembers how long each took.

    Attributes:
        seconds: wall-clock seconds of every finished phase, in order.
        quiet: none of them shows anything, whatever it was asked for.
    """

    quiet: ClassVar[bool] = False

    def __init__(self, *, silent: bool = False):
        self._silent = silent or self.quiet
        self.seconds: dict[str, float] = {}

    def fresh(self) -> Progress:
        """Another one that shows as much and has no phases behind it, for the next of several pieces of work."""
        return Progress(silent=self._silent)

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None, unit: str = "layer") -> Iterator[Callable[..., None]]:
        """Yields a function that advances the phase's bar by one unit, or by as many as it is given.

        ``total`` is None where nobody knows.
        """
        start = time.perf_counter()
        with tqdm(
            total=total, desc=f"{name:<28}", unit=unit, unit_scale=unit == "B", file=sys.stderr, disable=self._silent
        ) as bar:
            yield lambda count=1: bar.update(count) and None
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def note(self, text: str) -> None:
        """A line between bars."""
        if not self._silent:
            tqdm.write(text, file=sys.stderr)
