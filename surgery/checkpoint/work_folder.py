"""Folder for unfinished work next to an output, such as ``<out>.healing``. Needs no torch."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.output_path import LOCK
from surgery.common.errors import SurgeryError

MARKER = ".surgery-work"


class WorkFolder:
    """Folder with a marker that distinguishes it from a user's, and ``names``, the files and folders written there."""

    def __init__(self, path: Path, names: tuple[str, ...]):
        self.path, self._names = path, names

    def open(self) -> None:
        """Create the folder, or reuse that of an earlier run.

        Raises SurgeryError: the folder is not ours, or cannot be created.
        """
        with disk_errors(self.path):
            if os.path.lexists(self.path) and not self._is_ours():
                raise SurgeryError.at(
                    self.path, "exists and was not written by surgery; move it away or choose another --out"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / MARKER).touch()

    def clear(self) -> None:
        """Remove what earlier runs wrote, to start from scratch."""
        with disk_errors(self.path):
            for path in (self.path / name for name in self._names):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    def remove(self) -> bool:
        """Remove the folder; return whether it is gone: other files stay in it."""
        self.clear()
        with suppress(OSError):
            if {path.name for path in self.path.iterdir()} <= {MARKER, LOCK}:
                shutil.rmtree(self.path)
        return not self.path.exists()

    def _is_ours(self) -> bool:
        if self.path.is_symlink() or not self.path.is_dir():
            return False
        marker = self.path / MARKER
        is_marked = marker.is_file() and not marker.is_symlink()
        return is_marked or {path.name for path in self.path.iterdir()} <= {LOCK}
