"""Temporary folders that are removed at process exit; those of killed processes are removed by the next process.

A marker next to each folder names its program, user, process and inode. Nothing else in ``TMPDIR`` is ever removed.
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

from surgery.common.errors import SurgeryError
from surgery.common.file_lock import Lock, try_lock
from surgery.common.ownership import is_own, owner

PREFIX, LOCK = "surgery-", ".lock"
OTHER_TEMPORARY = "set TMPDIR to a folder on another disk"


class TemporaryFolder:
    """Folder below ``TMPDIR`` that is removed with this object, at the latest at process exit.

    A locked file next to the folder tells other processes that it is in use.

    Args:
        kind: kind of content, for the folder's name.

    Attributes:
        remove: callable that removes the folder now.

    Raises:
        SurgeryError: the folder cannot be created.
    """

    def __init__(self, kind: str):
        try:
            _remove_abandoned()
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
            try:
                lock = _create_lock(self.path)
            except BaseException:
                self.path.rmdir()
                raise
        except OSError as error:  # also if no folder for temporary files can be written
            message = f"no temporary folder can be made ({error.strerror or error}); {OTHER_TEMPORARY}"
            raise SurgeryError(message, hint=OTHER_TEMPORARY) from error
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc: object) -> None:
        self.remove()


def is_temporary(path: Path) -> bool:
    """Return whether a path lies in a temporary folder of this program."""
    roots = (_temporary_root(), _temporary_root().resolve())
    return any(each.name.startswith(PREFIX) for each in (path, *path.parents) if each.parent in roots)


def _temporary_root() -> Path:
    return Path(tempfile.gettempdir())


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _create_lock(folder: Path) -> TextIO | None:
    """Create the locked marker; it gets its name only when locked and written, so that no process finds it unlocked.

    None on systems without locks: the folders of killed processes then stay.
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
        with contextlib.suppress(OSError):  # close() flushes again
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
    """Remove folders of this program and user whose process has ended."""
    for path in _temporary_root().glob(f"{PREFIX}*{LOCK}"):
        folder = path.with_name(path.name.removesuffix(LOCK))
        if (handle := _try_lock(path)) is not None:
            marker = _read(handle)
            if is_own(marker):
                if os.path.lexists(folder) and marker.get("folder") == _inode(folder):
                    shutil.rmtree(folder, ignore_errors=True)  # does not follow links
                path.unlink(missing_ok=True)
            os.close(handle)


def _read(handle: int) -> Any:
    """Read the marker from an open file; None if invalid."""
    try:
        return json.loads(os.read(handle, 4096))
    except (OSError, ValueError):
        return None


def _try_lock(lock: Path) -> int | None:
    """Lock a marker file of this user; None if it belongs to another user or is locked."""
    try:
        if lock.lstat().st_uid != os.getuid():
            return None
        handle = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # removed in the meantime
        return None
    if try_lock(handle) is Lock.TAKEN:
        return handle
    os.close(handle)
    return None
