"""A folder of unfinished work next to an output, such as ``<out>.healing``: marked, and cleared of nothing but its own.

Needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.checkpoint.output_place import LOCK
from surgery.common.errors import SurgeryError
from surgery.common.ownership import IsOwned, first_foreign, is_own, matching, owner, remove_owned

MARKER = ".surgery-work"


class WorkFolder:
    """A folder that a marker tells from a user's.

    Args:
        path: of the folder.
        owned: gives what runs have written in it so far, besides marker and lock.
        proof: subfolders by which the folder of a version without markers is known.
    """

    def __init__(self, path: Path, owned: Callable[[], IsOwned], proof: tuple[str, ...]):
        self.path, self._owned, self._proof = path, owned, proof

    def open(self) -> None:
        """Makes the folder, or goes on with that of an earlier run.

        Raises:
            SurgeryError: it is somebody else's, or cannot be made.
        """
        marker = self.path / MARKER
        with disk_errors(self.path):
            if os.path.lexists(self.path) and not self._is_ours(marker):
                raise SurgeryError.at(self.path, "is in the way and not ours; move it away or choose another --out")
            self.path.mkdir(parents=True, exist_ok=True)
        if not marker.is_file():
            write_whole(marker, json.dumps(owner()) + "\n")

    def clear(self) -> None:
        """Removes what earlier runs have written, for a run from scratch.

        Raises:
            SurgeryError: the folder holds a file that none has written; nothing is removed.
        """
        with disk_errors(self.path):
            if (foreign := first_foreign(self.path, self._all())) is not None:
                raise SurgeryError.at(self.path, f"{foreign} was not written by surgery; move it away to start again")
            remove_owned(self.path, self._owned())

    def remove(self) -> str | None:
        """Removes the folder; returns the first path that stays, because somebody else put it there."""
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
        names = {path.name for path in self.path.iterdir()} - {LOCK}
        return not names or (
            any((self.path / name).is_dir() for name in self._proof) and first_foreign(self.path, self._all()) is None
        )
