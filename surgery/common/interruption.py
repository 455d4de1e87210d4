"""Handling of SIGTERM and SIGHUP like Ctrl-C: they raise an exception, so that cleanup code runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ASKED = (signal.SIGTERM, signal.SIGHUP)
"""Termination signals."""

_unfinished: list[Path] = []


def resumes_from(path: Path) -> None:
    """Register a file or folder from which the same command resumes. A folder without files does not count."""
    _unfinished.append(path)


def remains() -> str:
    """Describe for a message the newest unfinished output to resume from, or that there is none."""
    path = next((path for path in reversed(_unfinished) if _holds_files(path)), None)
    return (
        "nothing was kept" if path is None else f"{path} keeps the finished work; run the same command again to resume"
    )


def _holds_files(path: Path) -> bool:
    files = (file for file in path.rglob("*") if not file.name.startswith(".")) if path.is_dir() else (path,)
    return any(file.is_file() for file in files)


class Interruption:
    """The signal that stopped a block: SIGINT, SIGTERM or SIGHUP; None if it was not interrupted."""

    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """Exit code by the shell convention: 128 plus the signal number."""
        return 128 + (self.signal or 0)


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt in the block, as SIGINT does, and record which signal arrived.

    Both are ignored after the first signal: schedulers repeat SIGTERM and a closing terminal sends SIGHUP, which would
    interrupt the cleanup. SIGHUP stays ignored under nohup. Does nothing outside the main thread, the only one that can
    set signal handlers.
    """
    _unfinished.clear()
    caught, before = Interruption(), {}

    def take(number: int, frame: FrameType | None) -> None:
        caught.signal = number
        for again in ASKED:
            signal.signal(again, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signals = [number for number in (signal.SIGINT, *ASKED) if number != signal.SIGHUP or not _ignored(number)]
        before = {number: signal.signal(number, take) for number in signals}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
