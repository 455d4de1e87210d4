"""Locks on files by which processes know of each other; they end with the process, however it ends."""

from __future__ import annotations

from enum import Enum
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Lock(Enum):
    """What became of asking for one."""

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
