"""States of long loops, by the loop's name, from which the same work goes on after its process was killed.

A state is a zip archive, as torch writes them, which holds the CRC-32 of its own contents and next to them those of the
files that it speaks of. Against what disks and copies do these tell as surely as SHA-256, at four times its speed
(4 GiB/s against 0.8 on one core): a disk that takes the same activations is slower. Nobody is kept out by them, and who
may write here may write the result.
"""

from __future__ import annotations

import json
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from surgery.checkpoint.disk import disk_errors, sync_tree, written_whole

INTERVAL = 20.0
"""Seconds of work that may be lost: a state is as large as the activations, and takes time to write."""
_PIECE = 2**22


class Snapshots:
    """The last state of every loop, one file each, replaced whole.

    Args:
        folder: where they lie, and in folders there the files that they speak of, which stay unchanged from then on;
            None keeps nothing.
    """

    def __init__(self, folder: Path | None = None):
        self.folder, self._written = folder, time.monotonic()
        self._known: dict[Path, tuple[tuple[int, int], int]] = {}  # size and time of change, and checksum

    def last(self, loop: str, *types: type) -> dict[str, Any] | None:
        """The last state that was taken in this loop; None without one.

        Args:
            types: classes in it, next to tensors and plain values.
        """
        if self.folder is None or not (path := self._path(loop)).is_file():
            return None
        with disk_errors(path), torch.serialization.safe_globals(list(types)):
            return torch.load(path, weights_only=True, mmap=True)

    def discard_damaged(self) -> list[str]:
        """Removes states that are no longer what was written, or whose files are not; and files that no state is of.

        Loops without a state begin from scratch, behind what is left of those before them.

        Returns:
            Names of the loops.
        """
        damaged, spoken_of = [], set()
        for path in sorted(self.folder.glob("*.state")):
            with disk_errors(path):
                if (files := self._sound(path)) is None:
                    damaged.append(path.stem)
                    path.unlink()
                else:
                    spoken_of |= files.keys()
        with disk_errors(self.folder):
            for path in self._files():
                if self._name(path) not in spoken_of:  # as a killed run left it, perhaps in part
                    path.unlink()
        return damaged

    def due(self) -> bool:
        """Return whether the last state of any loop is old enough for another."""
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
            with zipfile.ZipFile(part, "a") as archive:
                archive.writestr(_list_in(archive), json.dumps(self._checksums()))
        self._written = time.monotonic()

    def has_state(self, loop: str = "*") -> bool:
        """Return whether there is a state of this loop; without a name, of any."""
        return self.folder is not None and any(self.folder.glob(f"{loop}.state"))

    def _path(self, loop: str) -> Path:
        return self.folder / f"{loop}.state"

    def _sound(self, path: Path) -> dict[str, int] | None:
        """Checksums of the files that a state speaks of, by name; None where these or the state were damaged."""
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    return None
                files = json.loads(archive.read(_list_in(archive)))
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, LookupError, ValueError):
            return None
        return files if files.items() <= self._checksums().items() else None

    def _checksums(self) -> dict[str, int]:
        """CRC-32 of every file, each read once as long as nobody writes to it."""
        for path in self._files():
            status = path.stat()
            stamp = status.st_size, status.st_mtime_ns
            if path not in self._known or self._known[path][0] != stamp:
                self._known[path] = stamp, _crc32(path)
        return {self._name(path): self._known[path][1] for path in self._files()}

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*/*") if path.is_file())

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def _list_in(archive: zipfile.ZipFile) -> str:
    """The name that the list of files has: torch reads no archive with files outside its one folder."""
    return f"{archive.namelist()[0].partition('/')[0]}/files.json"


def _crc32(path: Path) -> int:
    checksum = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return checksum
