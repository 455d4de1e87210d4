"""Temporary folders that are removed at process exit."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from surgery.common.errors import SurgeryError

PREFIX = ".surgery-temporary-"
OTHER_TEMPORARY = "set TMPDIR to a folder on another disk"


class TemporaryFolder:
    """Folder below ``TMPDIR`` that is removed with this object, at the latest at process exit, or by ``remove()``.

    Raises SurgeryError: the folder cannot be created.
    """

    def __init__(self, kind: str):
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
        except OSError as error:  # also if no folder for temporary files can be written
            message = f"no temporary folder can be made ({error.strerror or error}); {OTHER_TEMPORARY}"
            raise SurgeryError(message, hint=OTHER_TEMPORARY) from error
        self.remove = weakref.finalize(self, _remove, self.path, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exc: object) -> None:
        self.remove()


def is_temporary(path: Path) -> bool:
    """Return whether a path lies in a temporary folder of this program."""
    return any(each.name.startswith(PREFIX) for each in (path, *path.parents))


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves it to its parent
        shutil.rmtree(folder, ignore_errors=True)
