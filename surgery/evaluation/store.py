"""Results on disk, each under a key of everything that decides it, so that an evaluation goes on where it stopped."""

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
from surgery.checkpoint.output_place import LOCK
from surgery.common.errors import SurgeryError
from surgery.common.interruption import resumes_from
from surgery.common.other_threads import other_threads
from surgery.common.ownership import first_foreign, is_unchanged, matching, remove_owned

MARKER = "surgery-eval.json"
RESULT_FILES = (f"{'?' * 32}.json", ".*.partial")
STORE_FILES = (MARKER, LOCK, *(f"results/{name}" for name in RESULT_FILES))
"""Files of a store: what an interrupted evaluation resumes from."""


def key_of(facts: dict[str, Any]) -> str:
    """Key of a result: a hash of plain values, the same in every process."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class ResultStore:
    """The folder of an evaluation: one file a finished result, written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._results = folder / "results"

    @classmethod
    def open(cls, folder: Path) -> ResultStore:
        """Makes the folder, or goes on with that of an earlier evaluation.

        Raises:
            SurgeryError: it is a file, it cannot be written, or it holds something that is no evaluation.
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
        """Raises SurgeryError: what is there is a file, cannot be read, or holds something that is no evaluation."""
        try:
            if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
                raise SurgeryError.at(folder, "holds other things than an evaluation; choose another --out")
        except OSError as error:
            raise SurgeryError(f"--out {folder}: {error.strerror or error}") from None

    def go_on(self, threads: int, *, restart: bool = False) -> str | None:
        """Says, for people, where this goes on with other threads than it was begun with; for who is alone here.

        Args:
            restart: begin from scratch instead.

        Raises:
            SurgeryError: ``restart`` would remove what no evaluation has written.
        """
        if restart:
            self.clear()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            marker = json.loads((self.folder / MARKER).read_text(encoding="utf-8"))
            warning = other_threads(marker.get("threads"), threads)
            if any(self._results.iterdir()):
                return warning
        self._mark(threads=threads)
        return None

    def _mark(self, **facts: Any) -> None:
        content = {"what": "an evaluation by surgery eval", **self._marked(), **facts}
        path, text = self.folder / MARKER, json.dumps(content) + "\n"
        if path.exists():
            write_whole(path, text)
        else:  # at once: a killed process may leave no file in a folder without a marker
            path.write_text(text, encoding="utf-8")

    def _marked(self) -> dict[str, Any]:
        """Return the contents of the marker so far."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.folder / MARKER).read_text(encoding="utf-8")))
        return {}

    def check_files(self, names: Iterable[str], document: str, *, unfinished: bool = False) -> None:
        """Refuses to replace files of a report that this program has not written, or that were edited since.

        Args:
            document: that all the others are written with; it is ours in a folder of a version that kept no record.
            unfinished: a process was killed while it replaced them, before it recorded what it wrote.

        Raises:
            SurgeryError: there is such a file.
        """
        recorded, is_report = self._marked().get("files") or {}, _is_report(self.folder / document)
        for name in names:
            path = self.folder / name
            is_owned = unfinished or is_unchanged(path, recorded[name]) if name in recorded else is_report
            if os.path.lexists(path) and not is_owned:
                raise SurgeryError.at(path, "was not written by surgery, or edited since; move it away")

    def record_files(self, paths: Iterable[Path]) -> None:
        """Notes what was written as files of a report, if this is the folder of an evaluation."""
        if (self.folder / MARKER).is_file():
            files = {path.name: hash_file(path) for path in paths}
            self._mark(files={**(self._marked().get("files") or {}), **files})

    def get(self, key: str) -> dict[str, Any] | None:
        """The result under a key; None if there is none."""
        try:
            return json.loads((self._results / f"{key}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:  # a file that some other program damaged: measured again
            return None

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Keeps a result."""
        write_whole(self._results / f"{key}.json", json.dumps(result, indent=1, allow_nan=False) + "\n")

    def clear(self) -> None:
        """Removes all results.

        Raises:
            SurgeryError: something else lies among them; nothing is removed.
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
    """Return whether a document was written by this program: all of them record the version."""
    try:
        return isinstance(json.loads(path.read_bytes())["surgery_version"], str) and not path.is_symlink()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
