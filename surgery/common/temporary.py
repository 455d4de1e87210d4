"""Temporary folders that are removed at process exit; those of killed processes are removed by the next process.

Each folder is locked while its process runs. Nothing without this program's prefix is ever removed from ``TMPDIR``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from surgery.common.errors import SurgeryError
from surgery.common.file_lock import Lock, try_lock

PREFIX = ".surgery-temporary-"
OTHER_TEMPORARY = "set TMPDIR to a folder on another disk"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class TemporaryFolder:
    """Folder below ``TMPDIR`` that is removed with this object, at the latest at process exit, or by ``remove()``.

    Raises SurgeryError: the folder cannot be created.
    """

    def __init__(self, kind: str):
        try:
            _remove_abandoned()
            self.path, lock = _create(kind)
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


def _create(kind: str) -> tuple[Path, int]:
    """Create and lock a folder, again if another process removes it before it is locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        with suppress(FileNotFoundError):
            lock = os.open(path, _FOLDER)
            if try_lock(lock) is not Lock.HELD and path.exists():
                return path, lock
            os.close(lock)


def _remove(folder: Path, lock: int, process: int) -> None:
    if os.getpid() != process:  # a forked child leaves it to its parent
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_abandoned() -> None:
    """Remove folders of this user whose process has ended."""
    for folder in _temporary_root().glob(f"{PREFIX}*"):
        with suppress(OSError):  # a link, or removed in the meantime
            if folder.lstat().st_uid == os.getuid():
                lock = os.open(folder, _FOLDER)
                if try_lock(lock) is Lock.TAKEN:
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
