"""Handling of SIGTERM and SIGHUP like Ctrl-C: they raise an exception, so that cleanup code runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

ASKED = (signal.SIGTERM, signal.SIGHUP)
"""Termination signals."""

STARTED_BY = "SURGERY_STARTED_BY"
"""Environment variable with the id of the parent process; this process stops when the parent has ended."""


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


def stop_with_parent() -> None:
    """Start a thread that sends this process SIGTERM, so that it saves its state, when its `STARTED_BY` parent ends."""
    if starter := os.environ.get(STARTED_BY):
        threading.Thread(target=_stop_with, args=(int(starter),), daemon=True).start()


def _stop_with(starter: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(starter)
        # A zombie has ended too: in a container it may never be reaped.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
