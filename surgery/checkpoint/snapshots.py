"""Snapshots of long loops, from which a killed process resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from surgery.checkpoint.disk import disk_errors, sync_tree, written_whole
from surgery.common.errors import SurgeryError

INTERVAL = 20.0
"""Seconds between snapshots, the work that may be lost: a state is as large as the activations and takes time."""


class Snapshots:
    """Last state of every loop, one file per loop, replaced atomically; None as folder disables snapshots.

    Subfolders contain the files that states refer to, which must not change afterwards.
    """

    def __init__(self, folder: Path | None = None):
        self.folder, self._written = folder, time.monotonic()

    def last(self, loop: str, *types: type) -> dict[str, Any] | None:
        """Load the last state of a loop, with these classes besides tensors and plain values; None if there is none.

        Raises SurgeryError: the file is damaged.
        """
        if self.folder is None or not (path := self._path(loop)).is_file():
            return None
        try:
            with disk_errors(path), torch.serialization.safe_globals(list(types)):
                return torch.load(path, weights_only=True, mmap=True)
        except SurgeryError:
            raise
        except Exception as error:  # of the archive, the pickle or its contents
            raise SurgeryError.at(path, "damaged; pass --restart to begin again") from error

    def due(self) -> bool:
        """Return whether `INTERVAL` has passed since the last state of any loop."""
        return self.folder is not None and time.monotonic() - self._written >= INTERVAL

    def take(self, loop: str, state: Callable[[], dict[str, Any]]) -> None:
        """Write a state if one is due; flushes the files in the folder to disk first, as the state may refer to them.

        Raises SurgeryError: the disk is full.
        """
        if not self.due():
            return
        with written_whole(self._path(loop)) as part:
            sync_tree(self.folder)
            torch.save(state(), part)
        self._written = time.monotonic()

    def has_state(self, loop: str = "*") -> bool:
        """Return whether there is a state of this loop, or of any loop by default."""
        return self.folder is not None and any(self.folder.glob(f"{loop}.state"))

    def _path(self, loop: str) -> Path:
        return self.folder / f"{loop}.state"
