"""Tokenized documents on disk: written once, memory-mapped by every run and process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from surgery.checkpoint.disk import as_json, disk_errors, read_json_or_empty, sync_folder, sync_tree
from surgery.common.errors import SurgeryError

ABOUT = "about.json"
TOKENS, LENGTHS = "tokens.i4", "lengths.i8"
"""Files of the folder: little-endian, with the dtype as extension."""


class TokenFile:
    """Tokenized documents of one source; created by `read` or `write`.

    `lengths` [D] int64 are the tokens of each document, `sha256` is the hash of all tokens.
    """

    def __init__(self, folder: Path, sha256: str) -> None:
        """Map the files of a folder into memory."""
        self.sha256 = sha256
        self.lengths = np.memmap(folder / LENGTHS, dtype="<i8", mode="r")
        self._tokens = np.memmap(folder / TOKENS, dtype="<i4", mode="r")
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int, start: int = 0, end: int | None = None) -> list[int]:
        """Return the token ids of a document from `start` to `end`."""
        first = int(self._starts[number])
        span = slice(first + start, first + (int(self.lengths[number]) if end is None else end))
        return self._tokens[span].tolist()

    @classmethod
    def read(cls, folder: Path, identity: Mapping[str, Any]) -> TokenFile | None:
        """Open the documents in a folder; None if it holds none, those of another identity, or damaged ones."""
        about = read_json_or_empty(folder / ABOUT)
        if about.get("identity") != as_json(identity):
            return None
        try:
            file = cls(folder, about["sha256"])
        except (KeyError, OSError, ValueError):
            return None
        sizes = len(file.lengths), len(file._tokens)
        return file if sizes == (about.get("documents"), about.get("tokens")) else None

    @classmethod
    def write(
        cls,
        folder: Path,
        identity: Mapping[str, Any],
        documents: Iterable[list[int]],
        limit: int | None = None,
        advance: Callable[[int], Any] = int,
    ) -> TokenFile:
        """Write documents to the folder atomically, up to `limit` tokens; the last document is not truncated.

        `identity` are JSON values that determine the documents; `advance` is called with the tokens of every document.
        Raises SurgeryError: there are no documents, one cannot be read, or the folder cannot be written.
        """
        partial = folder.with_name(folder.name + ".partial")
        with disk_errors(folder):
            shutil.rmtree(partial, ignore_errors=True)  # left by a run that was stopped
            partial.mkdir(parents=True)
            try:
                about = {**_write(partial, documents, limit, advance), "identity": as_json(identity)}
                (partial / ABOUT).write_text(json.dumps(about, indent=2), encoding="utf-8")
                sync_tree(partial)
                if folder.exists():
                    shutil.rmtree(folder)  # documents of another identity
                os.rename(partial, folder)
                sync_folder(folder.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return cls(folder, about["sha256"])


def _write(
    folder: Path, documents: Iterable[list[int]], limit: int | None, advance: Callable[[int], Any]
) -> dict[str, Any]:
    """Write the token and length files; return the counts and the hash."""
    digest, lengths, total = hashlib.sha256(), [], 0
    with open(folder / TOKENS, "wb") as file:
        for document in documents:
            if not document:
                continue
            data = np.array(document, dtype="<i4").tobytes()
            file.write(data)
            digest.update(data)
            lengths.append(len(document))
            total += lengths[-1]
            advance(lengths[-1])
            if limit is not None and total >= limit:
                break
    if not lengths:
        raise SurgeryError("data has no text: use a file or a dataset that is not empty")
    data = np.array(lengths, dtype="<i8").tobytes()
    (folder / LENGTHS).write_bytes(data)
    digest.update(data)
    return {"documents": len(lengths), "tokens": total, "sha256": digest.hexdigest()}
