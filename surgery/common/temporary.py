"""Temporary folders that go with their process; those of processes that were killed go when the next one is made.

The marker next to a folder names its program, user, process and inode: nothing else in ``TMPDIR`` is ever removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, TextIO

from surgery.common.file_lock import Lock, try_lock
from surgery.common.ownership import is_own, owner

PREFIX, LOCK = "surgery-", ".lock"


class TemporaryFolder:
    """A folder where ``TMPDIR`` says, that goes with this object, at the latest with the process that made it.

    A file next to it is locked for as long, by which others know that the folder is in use.

    Args:
        kind: of what lies in it, for its name.

    Attributes:
        remove: removes it now.
    """

    def __init__(self, kind: str):
        _remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        try:
            lock = _locked(self.path)
        except BaseException:
            self.path.rmdir()
            raise
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc: object) -> None:
        self.remove()


def is_temporary(path: Path) -> bool:
    """Return whether a path lies in a folder of this kind."""
    return any(each.name.startswith(PREFIX) for each in (path, *path.parents) if each.parent == _place())


def _place() -> Path:
    return Path(tempfile.gettempdir())


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _locked(folder: Path) -> TextIO | None:
    """The locked marker, which gets its name once it is locked and written, so that nobody finds it free.

    None where there are no locks: what a killed process leaves then stays.
    """
    number, unnamed = tempfile.mkstemp(prefix=f".{PREFIX}", dir=folder.parent)
    handle = os.fdopen(number, "w")
    if try_lock(handle) is not Lock.TAKEN:
        handle.close()
        os.unlink(unnamed)
        return None
    try:
        json.dump(owner(folder=_inode(folder)), handle)
        handle.flush()
        os.replace(unnamed, _lock_of(folder))
    except BaseException:
        with contextlib.suppress(OSError):  # it flushes once more
            handle.close()
        os.unlink(unnamed)
        raise
    return handle


def _inode(folder: Path) -> list[int]:
    status = folder.lstat()
    return [status.st_dev, status.st_ino]


def _remove(folder: Path, lock: TextIO | None, process: int) -> None:
    if os.getpid() != process:  # a forked child leaves it to its parent
        return
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        _lock_of(folder).unlink(missing_ok=True)
        lock.close()


def _remove_abandoned() -> None:
    """Removes folders of this program and user whose process is no more."""
    for path in _place().glob(f"{PREFIX}*{LOCK}"):
        folder = path.with_name(path.name.removesuffix(LOCK))
        if (handle := _try_lock(path)) is not None:
            marker = _read(handle)
            if is_own(marker):
                if os.path.lexists(folder) and marker.get("folder") == _inode(folder):
                    shutil.rmtree(folder, ignore_errors=True)  # no link is followed
                path.unlink(missing_ok=True)
            os.close(handle)


def _read(handle: int) -> Any:
    """The marker in an open file; None where there is none."""
    try:
        return json.loads(os.read(handle, 4096))
    except (OSError, ValueError):
        return None


def _try_lock(lock: Path) -> int | None:
    """A lock of this user that nobody held; None of others."""
    try:
        if lock.lstat().st_uid != os.getuid():
            return None
        handle = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile
        return None
    if try_lock(handle) is Lock.TAKEN:
        return handle
    os.close(handle)
    return None
