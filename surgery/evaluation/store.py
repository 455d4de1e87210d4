"""Results on disk, each under a key of everything that decides it, so that an evaluation goes on where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.common.errors import SurgeryError
from surgery.common.other_threads import other_threads

MARKER = "surgery-eval.json"


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
        except OSError as error:
            raise SurgeryError(f"--out {folder}: {error.strerror or error}") from None
        return store

    @staticmethod
    def check(folder: Path) -> None:
        """Raises SurgeryError: what is there is a file, cannot be read, or holds something that is no evaluation."""
        try:
            if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
                raise SurgeryError(f"{folder}: holds other things than an evaluation; choose another --out")
        except OSError as error:
            raise SurgeryError(f"--out {folder}: {error.strerror or error}") from None

    def go_on(self, threads: int, *, restart: bool = False) -> str | None:
        """Says, for people, where this goes on with other threads than it was begun with; for who is alone here.

        Args:
            restart: begin anew instead.
        """
        if restart:
            self.clear()
        with contextlib.suppress(OSError, ValueError, AttributeError):
            said = other_threads(json.loads((self.folder / MARKER).read_text(encoding="utf-8")).get("threads"), threads)
            if any(self._results.iterdir()) or (self.folder / "unfinished").exists():
                return said
        self._mark(threads=threads)
        return None

    def _mark(self, **facts: int) -> None:
        content = {"what": "an evaluation by surgery eval", **facts}
        (self.folder / MARKER).write_text(json.dumps(content) + "\n", encoding="utf-8")

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

    def scratch(self, key: str) -> Path:
        """A folder for parts of unfinished results of one model."""
        folder = self.folder / "unfinished" / key
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def drop_scratch(self, key: str) -> None:
        """Removes that folder, once the result is whole, and the one around it with the last of them."""
        folder = self.folder / "unfinished" / key
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there are others
            folder.parent.rmdir()

    def clear(self) -> None:
        """Removes all results and parts of them."""
        with disk_errors(self.folder):
            shutil.rmtree(self.folder / "unfinished", ignore_errors=True)
            shutil.rmtree(self._results)
            self._results.mkdir()
