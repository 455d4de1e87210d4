"""Advisory file locks between processes; the operating system releases them when a process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from surgery.common.errors import SurgeryError


def hold(path: Path, output: Path, option: str = "--out") -> IO:
    """Open and lock a file, creating it if needed; closing it releases the lock. Links are not followed.

    ``output`` and ``option``, its flag, are for the error message. Disks without locks give no protection.

    Raises:
        SurgeryError: another process holds the lock.
        OSError: the file cannot be created.
    """
    while True:
        file = open(path, "a", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise SurgeryError(
                f"{output}: another surgery process is writing it; wait for it or choose another {option}"
            ) from None
        except OSError:  # some network disks have no locks
            pass
        if is_at(file, path):
            return file
        file.close()  # the previous owner removed the file after we opened it


def is_at(file: IO, path: Path) -> bool:
    """Return whether a path still refers to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
