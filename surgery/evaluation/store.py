"""Results on disk, each under a hash of everything that determines it, so that an evaluation can be resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.checkpoint.file_hashes import hash_file
from surgery.checkpoint.output_path import LOCK
from surgery.common.errors import SurgeryError
from surgery.common.interruption import resumes_from
from surgery.common.ownership import first_foreign, is_unchanged, matching, remove_owned

MARKER = "surgery-eval.json"
RESULT_FILES = (f"{'?' * 32}.json", ".*.partial")
STORE_FILES = (MARKER, LOCK, *(f"results/{name}" for name in RESULT_FILES))
"""Files of a result store, from which an interrupted evaluation resumes."""


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
        try:
            folder.mkdir(parents=True, exist_ok=True)
            store = cls(folder)
            if not (folder / MARKER).exists():
                store._mark()
            store._results.mkdir(exist_ok=True)
            resumes_from(store._results)
        except OSError as error:
            raise SurgeryError(f"--out {folder}: {error.strerror or error}") from None
        return store

    @staticmethod
    def check(folder: Path) -> None:
        """Raise SurgeryError if the path is a file, cannot be read, or is a non-empty folder without an evaluation."""
        try:
            if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
                raise SurgeryError.at(folder, "contains files other than an evaluation's; choose another --out")
        except OSError as error:
            raise SurgeryError(f"--out {folder}: {error.strerror or error}") from None

    def _mark(self, **facts: Any) -> None:
        content = {"what": "an evaluation by surgery eval", **self._marker(), **facts}
        path, text = self.folder / MARKER, json.dumps(content) + "\n"
        if path.exists():
            write_whole(path, text)
        else:  # directly: a killed process must not leave a temporary file in a folder without a marker
            path.write_text(text, encoding="utf-8")

    def _marker(self) -> dict[str, Any]:
        """Return the current contents of the marker; empty without a marker."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.folder / MARKER).read_text(encoding="utf-8")))
        return {}

    def check_files(self, names: Iterable[str], document: str, *, unfinished: bool = False) -> None:
        """Check that report files to be replaced were written by this program and not edited since.

        ``document`` identifies the report of a version that did not record files; ``unfinished``: a process was killed
        before it recorded them. Raises SurgeryError: a file is foreign or was edited.
        """
        recorded, is_report = self._marker().get("files") or {}, _is_report(self.folder / document)
        for name in names:
            path = self.folder / name
            is_owned = unfinished or is_unchanged(path, recorded[name]) if name in recorded else is_report
            if os.path.lexists(path) and not is_owned:
                raise SurgeryError.at(path, "was not written by surgery, or edited since; move it away")

    def record_files(self, paths: Iterable[Path]) -> None:
        """Record written report files with their hashes in the marker, if there is one."""
        if (self.folder / MARKER).is_file():
            files = {path.name: hash_file(path) for path in paths}
            self._mark(files={**(self._marker().get("files") or {}), **files})

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the result of a key; None if it is missing or damaged."""
        try:
            return json.loads((self._results / f"{key}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:  # a damaged file is measured again
            return None

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Store a result under a key."""
        write_whole(self._results / f"{key}.json", json.dumps(result, indent=1, allow_nan=False) + "\n")

    def clear(self) -> None:
        """Remove all results. The caller must hold the lock of the folder.

        Raises SurgeryError: the results folder has foreign files; nothing is removed.
        """
        with disk_errors(self.folder):
            is_owned = matching(RESULT_FILES)
            if self._results.is_dir() and (foreign := first_foreign(self._results, is_owned)) is not None:
                raise SurgeryError(
                    f"{self._results}: {foreign} was not written by surgery; move it away to start again"
                )
            if self._results.is_dir():
                remove_owned(self._results, is_owned)
            self._results.mkdir(exist_ok=True)


def _is_report(path: Path) -> bool:
    """Return whether a document was written by this program, which always records its version."""
    try:
        return isinstance(json.loads(path.read_bytes())["surgery_version"], str) and not path.is_symlink()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
