"""States of long loops, by the loop's name, from which the same work goes on after its process was killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from surgery.checkpoint.disk import disk_errors, sync_tree, written_whole

INTERVAL = 20.0
"""Seconds of work that may be lost: a state is as large as the activations, and takes time to write."""


class Snapshots:
    """The last state of every loop, one file each, replaced whole.

    Args:
        folder: where they and the files lie that they speak of; None keeps nothing.
    """

    def __init__(self, folder: Path | None = None):
        self.folder, self._written = folder, time.monotonic()

    def last(self, loop: str, *types: type) -> dict[str, Any] | None:
        """The last state that was taken in this loop; None without one.

        Args:
            types: classes in it, beside tensors and plain values.
        """
        if self.folder is None or not (path := self._path(loop)).is_file():
            return None
        with disk_errors(path), torch.serialization.safe_globals(list(types)):
            return torch.load(path, weights_only=True, mmap=True)

    def due(self) -> bool:
        """Whether the last state of any loop is old enough for another."""
        return self.folder is not None and time.monotonic() - self._written >= INTERVAL

    def take(self, loop: str, state: Callable[[], dict[str, Any]]) -> None:
        """Keeps a state, if the last one of any loop is old enough.

        Whatever lies in the folder is on the disk before the state that may speak of it.

        Raises:
            SurgeryError: the disk is full.
        """
        if not self.due():
            return
        path = self._path(loop)
        with written_whole(path) as part:
            sync_tree(self.folder)
            torch.save(state(), part)
        self._written = time.monotonic()

    def taken(self, loop: str = "*") -> bool:
        """Whether there is a state of this loop; without a name, of any."""
        return self.folder is not None and any(self.folder.glob(f"{loop}.state"))

    def _path(self, loop: str) -> Path:
        return self.folder / f"{loop}.state"
