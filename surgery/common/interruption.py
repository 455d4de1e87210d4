"""SIGTERM ends a command as Ctrl-C does: as an exception, so that everything that cleans up behind errors does so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """What stopped a block.

    Attributes:
        signal: SIGINT or SIGTERM; None while nothing did.
    """

    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells have it."""
        return 128 + (self.signal or 0)


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Has SIGTERM, as SIGINT, raise KeyboardInterrupt in the block, and remembers which of them it was.

    SIGTERM is ignored from the first of them on: schedulers send it more than once, which would stop the cleaning up.
    Threads but the main one cannot take signals, and leave them as they are.
    """
    caught, before = Interruption(), {}

    def take(number: int, frame: FrameType | None) -> None:
        caught.signal = number
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
