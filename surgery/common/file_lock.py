"""Advisory file locks between processes; the operating system releases them when a process ends."""

from __future__ import annotations

import fcntl
import os
from enum import Enum
from pathlib import Path
from typing import IO

from surgery.common.errors import SurgeryError


class Lock(Enum):
    """Result of trying to lock a file."""

    HELD = "held by another process"
    TAKEN = "ours, as long as the file is open"
    NONE = "not to be had on this disk"


def try_lock(file: IO | int) -> Lock:
    """Try to lock an open file without blocking."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.HELD
    except OSError:  # some network disks have no locks
        return Lock.NONE
    return Lock.TAKEN


def hold(path: Path, output: Path, option: str = "--out") -> IO:
    """Open and lock a file, creating it if needed; closing it releases the lock.

    ``output`` and ``option``, its flag, are for the error message.

    Raises:
        SurgeryError: another process holds the lock.
        OSError: the file cannot be created.
    """
    while True:
        file = open(path, "a", opener=_without_links)  # noqa: SIM115 the caller closes it
        if try_lock(file) is Lock.HELD:
            file.close()
            raise SurgeryError(
                f"{output}: another surgery process is writing it; wait for it or choose another {option}"
            )
        if is_at(file, path):
            return file
        file.close()  # the previous owner removed the file after we opened it


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def is_at(file: IO, path: Path) -> bool:
    """Return whether a path still refers to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
