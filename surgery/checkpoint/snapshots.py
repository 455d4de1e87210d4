"""Snapshots of long loops, from which a killed process resumes.

A state is a zip archive written by torch.save, with the CRC-32 of its contents and of the files that it refers to.
CRC-32 detects disk and copy errors as reliably as SHA-256 at five times its speed. It is no protection against
attackers.
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
"""Seconds between snapshots, the work that may be lost: a state is as large as the activations and takes time."""
_PIECE = 2**22


class Snapshots:
    """Last state of every loop, one file per loop, replaced atomically; None as folder disables snapshots.

    Subfolders contain the files that states refer to, which must not change afterwards.
    """

    def __init__(self, folder: Path | None = None):
        self.folder, self._written = folder, time.monotonic()
        self._known: dict[Path, tuple[tuple[int, int], int]] = {}  # (size, mtime) and checksum

    def last(self, loop: str, *types: type) -> dict[str, Any] | None:
        """Load the last state of a loop, with these classes besides tensors and plain values; None if there is none."""
        if self.folder is None or not (path := self._path(loop)).is_file():
            return None
        with disk_errors(path), torch.serialization.safe_globals(list(types)):
            return torch.load(path, weights_only=True, mmap=True)

    def discard_damaged(self) -> list[str]:
        """Remove damaged states, states with damaged files, and files without a state; return the damaged loops.

        They start from scratch, after the last sound state of the loops before them.
        """
        damaged, referenced = [], set()
        for path in sorted(self.folder.glob("*.state")):
            with disk_errors(path):
                if (files := self._intact_checksums(path)) is None:
                    damaged.append(path.stem)
                    path.unlink()
                else:
                    referenced |= files.keys()
        with disk_errors(self.folder):
            for path in self._files():
                if self._name(path) not in referenced:  # from a killed run, perhaps incomplete
                    path.unlink()
        return damaged

    def due(self) -> bool:
        """Return whether `INTERVAL` has passed since the last state of any loop."""
        return self.folder is not None and time.monotonic() - self._written >= INTERVAL

    def take(self, loop: str, state: Callable[[], dict[str, Any]]) -> None:
        """Write a state if one is due; flushes the files in the folder to disk first, as the state may refer to them.

        Raises SurgeryError: the disk is full.
        """
        if not self.due():
            return
        path = self._path(loop)
        with written_whole(path) as part:
            sync_tree(self.folder)
            torch.save(state(), part)
            with zipfile.ZipFile(part, "a") as archive:
                archive.writestr(_checksums_path(archive), json.dumps(self._checksums()))
        self._written = time.monotonic()

    def has_state(self, loop: str = "*") -> bool:
        """Return whether there is a state of this loop, or of any loop by default."""
        return self.folder is not None and any(self.folder.glob(f"{loop}.state"))

    def _path(self, loop: str) -> Path:
        return self.folder / f"{loop}.state"

    def _intact_checksums(self, path: Path) -> dict[str, int] | None:
        """Return the checksums, by name, of the files that a state refers to; None if they or the state are damaged."""
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    return None
                files = json.loads(archive.read(_checksums_path(archive)))
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, LookupError, ValueError):
            return None
        return files if files.items() <= self._checksums().items() else None

    def _checksums(self) -> dict[str, int]:
        """Return the CRC-32 of every file; cached by size and mtime."""
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


def _checksums_path(archive: zipfile.ZipFile) -> str:
    """Return the archive path of the checksums; torch rejects archives with files outside its single folder."""
    return f"{archive.namelist()[0].partition('/')[0]}/files.json"


def _crc32(path: Path) -> int:
    checksum = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return checksum
