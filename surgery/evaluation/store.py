"""Results on disk, each under a hash of everything that determines it, so that an evaluation can be resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.common.errors import SurgeryError
from surgery.common.interruption import resumes_from

MARKER = "surgery-eval.json"
"""File that marks a folder as an evaluation's, with its report files and its folder ``results``."""


def key_of(facts: dict[str, Any]) -> str:
    """Compute the key of a result: a hash of plain values, equal in every process."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class ResultStore:
    """Folder of an evaluation, with one atomically written file per finished result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._results = folder / "results"

    @classmethod
    def open(cls, folder: Path) -> ResultStore:
        """Create the folder, or open that of an earlier evaluation.

        Raises SurgeryError: the path is a file, cannot be written, or is a non-empty folder without an evaluation.
        """
        cls.check(folder)
        store = cls(folder)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / MARKER).exists():
                # Directly: a killed process must not leave a temporary file in a folder without a marker.
                (folder / MARKER).write_text('{"what": "an evaluation by surgery eval"}\n', encoding="utf-8")
            store._results.mkdir(exist_ok=True)
        resumes_from(store._results)
        return store

    @staticmethod
    def check(folder: Path) -> None:
        """Raise SurgeryError if the path is a file, cannot be read, or is a non-empty folder without an evaluation."""
        with disk_errors(folder):
            if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
                raise SurgeryError.at(folder, "contains files other than an evaluation's; choose another --out")

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the result of a key; None if it is missing or damaged."""
        try:
            return json.loads((self._results / f"{key}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # a damaged file is measured again
            return None

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Store a result under a key."""
        write_whole(self._results / f"{key}.json", json.dumps(result, indent=1, allow_nan=False) + "\n")

    def clear(self) -> None:
        """Remove all results. The caller must hold the lock of the folder."""
        with disk_errors(self.folder):
            if self._results.exists():
                shutil.rmtree(self._results)
            self._results.mkdir()
