"""SIGTERM and SIGHUP end a command as Ctrl-C does: by an exception, so that what cleans up after errors does so."""

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

ASKED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals by which others ask a process to end; Windows lacks the second."""

STARTED_BY = "SURGERY_STARTED_BY"
"""Environment variable with the process id without which a process is to stop."""


_unfinished: list[Path] = []


def resumes_from(path: Path) -> None:
    """Names a file or folder that the same command, run again, resumes from. A folder without files is none yet."""
    _unfinished.append(path)


def remains() -> str:
    """A clause for people: the newest file or folder that this command leaves to resume from, or that there is none."""
    path = next((path for path in reversed(_unfinished) if _holds_files(path)), None)
    return "nothing was kept" if path is None else f"{path} keeps the finished work, the same command resumes"


def _holds_files(path: Path) -> bool:
    files = (file for file in path.rglob("*") if not file.name.startswith(".")) if path.is_dir() else (path,)
    return any(file.is_file() for file in files)


class Interruption:
    """Reason for which a block was stopped.

    Attributes:
        signal: SIGINT, SIGTERM or SIGHUP; None while nothing did.
    """

    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """128 and the signal's number, as shells have it."""
        return 128 + (self.signal or 0)


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt in the block, as SIGINT does, and record which of them it was.

    They are ignored from the first of them on: schedulers send SIGTERM more than once, and a terminal that closes sends
    SIGHUP after it, which would stop the cleaning up. Under nohup, which has SIGHUP ignored, it stays so. Threads but
    the main one cannot take signals, and leave them unchanged.
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


def stop_with_starter() -> None:
    """Send this process SIGTERM, so that it saves its state, once the process that `STARTED_BY` names has ended."""
    if os.name == "posix" and (starter := os.environ.get(STARTED_BY)):
        threading.Thread(target=_stop_with, args=(int(starter),), daemon=True).start()


def _stop_with(starter: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(starter)
        # A zombie has ended, though nobody asked how: in a container it may stay one for good.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
