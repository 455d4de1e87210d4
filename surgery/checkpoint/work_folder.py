"""Folder for unfinished work next to an output, such as ``<out>.healing``. Needs no torch.

A marker identifies the folder, and only files of this program are removed from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.checkpoint.output_path import LOCK
from surgery.common.errors import SurgeryError
from surgery.common.ownership import IsOwned, first_foreign, is_own, matching, owner, remove_owned

MARKER = ".surgery-work"


class WorkFolder:
    """Folder with a marker that distinguishes it from a user's; ``owned`` returns the predicate of written files."""

    def __init__(self, path: Path, owned: Callable[[], IsOwned]):
        self.path, self._owned = path, owned

    def open(self) -> None:
        """Create the folder, or reuse that of an earlier run.

        Raises SurgeryError: the folder is not ours, or cannot be created.
        """
        marker = self.path / MARKER
        with disk_errors(self.path):
            if os.path.lexists(self.path) and not self._is_ours(marker):
                raise SurgeryError.at(
                    self.path, "exists and was not written by surgery; move it away or choose another --out"
                )
            self.path.mkdir(parents=True, exist_ok=True)
        if not marker.is_file():
            write_whole(marker, json.dumps(owner()) + "\n")

    def clear(self) -> None:
        """Remove the files of earlier runs, to start from scratch.

        Raises SurgeryError: the folder contains a foreign file; nothing is removed.
        """
        with disk_errors(self.path):
            if (foreign := first_foreign(self.path, self._all())) is not None:
                raise SurgeryError.at(self.path, f"{foreign} was not written by surgery; move it away to start again")
            remove_owned(self.path, self._owned())

    def remove(self) -> str | None:
        """Remove the folder; return the first foreign path, which stays, or None."""
        with disk_errors(self.path):
            return remove_owned(self.path, self._all())

    def _all(self) -> IsOwned:
        is_owned, is_hidden = self._owned(), matching((MARKER, f".{MARKER}.*.partial", LOCK))
        return lambda path: is_owned(path) or is_hidden(path)

    def _is_ours(self, marker: Path) -> bool:
        if self.path.is_symlink() or not self.path.is_dir():
            return False
        if marker.is_file():
            try:
                return is_own(json.loads(marker.read_text(encoding="utf-8")))
            except ValueError:
                return False
        return {path.name for path in self.path.iterdir()} <= {LOCK}
