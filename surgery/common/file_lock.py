"""Locks on files by which processes know of each other; they end with the process, however it ends."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import IO

from surgery.common.errors import SurgeryError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Lock(Enum):
    """Outcome of asking for a lock."""

    HELD = "held by another process"
    TAKEN = "ours, as long as the file is open"
    NONE = "not to be had on this system or disk"


def try_lock(file: IO | int) -> Lock:
    """Locks an open file, if no other process has."""
    if fcntl is None:
        return Lock.NONE
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.HELD
    except OSError:  # some network disks have no locks
        return Lock.NONE
    return Lock.TAKEN


def hold(path: Path, place: Path, option: str = "--out") -> IO:
    """Opens and locks a file, which is made where there is none; who closes it gives the lock up.

    Args:
        place, option: what the lock is for and what names another, in the refusal.

    Raises:
        SurgeryError: another process has it.
        OSError: the file cannot be made.
    """
    while True:
        file = open(path, "a", opener=_without_links)  # noqa: SIM115 the caller's
        if try_lock(file) is Lock.HELD:
            file.close()
            raise SurgeryError(f"{place}: another surgery is writing it; wait for it or choose another {option}")
        if is_at(file, path):
            return file
        file.close()  # removed by the process that had it, after it was opened here


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def is_at(file: IO, path: Path) -> bool:
    """Return whether an open file is the one that has this name now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
