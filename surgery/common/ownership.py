"""Ownership: what this program may replace and remove, by its own records of what it wrote. Needs no torch.

- A result folder lists its files in a record: ``surgery_report.json``, ``surgery_healing.json`` or ``heal.json``. One
  file that is not listed, or was edited since, makes the whole folder the user's.
- A folder of unfinished work carries a ledger, which names each file before it is written.
- A single file carries `MARK` or the signature of its format.

Whatever is not recognized is named in the refusal and stays. Links and empty folders are never ours.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from surgery.common.errors import SurgeryError

PROGRAM = "model-surgery"
MARK = f"Written by {PROGRAM}"
"""Text in every single file that may be replaced: a comment, or metadata of the format."""

RECORDS = ("surgery_report.json", "surgery_healing.json", "heal.json")
"""Files whose ``files`` list what a result folder holds, with hashes; ``other_files`` those that may be edited."""

HIDDEN = ".surgery-"
"""Beginning of the names of this program's hidden files and folders."""

_SIGNATURES = (MARK.encode(), b'"surgery_heads"', b"# surgery convert ", b'"command": "surgery bench')
_EDGE = 2**16
_HASHED = 2**25
"""Larger files are weights: compared by name only, reading them would take minutes."""
_UNLISTED = ("README.md", "README.source.md", "heal.jsonl", "adapter/*")
"""Files that records of versions before ``other_files`` do not list."""

IsOwned = Callable[[str], bool]
"""Tells whether this program wrote a path of a folder. Paths have slashes; those of folders end in one."""


def matching(patterns: Iterable[str]) -> IsOwned:
    """Owns the paths that match a pattern, compared part by part, and the folders on the way to them."""
    split = [pattern.split("/") for pattern in patterns]

    def is_owned(path: str) -> bool:
        parts, is_folder = path.rstrip("/").split("/"), path.endswith("/")
        return any(
            (len(parts) < len(pattern) if is_folder else len(parts) == len(pattern))
            and all(map(fnmatchcase, parts, pattern))
            for pattern in split
        )

    return is_owned


def nested(is_owned: IsOwned, **folders: IsOwned) -> IsOwned:
    """Owns what ``is_owned`` does, and in folders of these names what theirs do."""

    def both(path: str) -> bool:
        first, _, rest = path.partition("/")
        return (not rest or folders[first](rest)) if first in folders and "/" in path else is_owned(path)

    return both


def first_foreign(folder: Path, is_owned: IsOwned) -> str | None:
    """The first path below a folder that this program did not write: a file, a link or an empty folder."""
    return next((path for path, is_ours in _walk(folder, is_owned) if not is_ours), None)


def remove_owned(folder: Path, is_owned: IsOwned) -> str | None:
    """Removes what this program wrote below a folder, and the folder with the last of it.

    Returns:
        The first path that stays, because somebody else put it there; None where the folder is gone.
    """
    stays = None
    for path, is_ours in list(_walk(folder, is_owned)):
        if not is_ours:
            stays = stays or path
        elif path.endswith("/"):
            _remove_empty(folder / path)
        else:
            (folder / path).unlink(missing_ok=True)
            _remove_empty(*(folder / parent for parent in list(Path(path).parents)[:-1]))
    if stays is None:
        _remove_empty(folder)
    return stays


def inventory(folder: Path, besides: Iterable[str] = ()) -> dict[str, str | None]:
    """Files below a folder, for a record: SHA-256 by path, None for large ones. Hidden files of ours are left out."""
    besides = set(besides)
    paths = (path for path, _ in _walk(folder, lambda path: True) if not path.endswith("/"))
    return {path: _hash(folder / path) for path in sorted(paths) if path not in besides and not path.startswith(HIDDEN)}


def check_replaceable(folder: Path) -> None:
    """Refuses to replace a folder that holds anything but a result of this program.

    Raises:
        SurgeryError: it does, with the name of the first such file.
    """
    _, foreign = owned_result(folder)
    if foreign is not None:
        raise SurgeryError.at(
            folder,
            f"holds other files than a checkpoint that surgery wrote, first {foreign}; move it away or"
            " choose another --out",
        )


def owned_result(folder: Path, *more: str) -> tuple[IsOwned, str | None]:
    """Tells what of a result folder this program wrote, and the first path that it did not write.

    Args:
        more: names of further files that are its own.
    """
    first: tuple[IsOwned, str | None] | None = None
    for name in RECORDS:
        is_owned = _recorded(folder, name, more)
        if is_owned is not None:
            foreign = first_foreign(folder, is_owned)
            if foreign is None:
                return is_owned, None
            first = first or (is_owned, foreign)
    nothing = matching(more)
    return first or (nothing, first_foreign(folder, nothing))


def check_file(path: Path, *, overwrite: bool, option: str = "--out") -> None:
    """Refuses a single output file where one is that may not be replaced. The one rule for files of all commands.

    A file is replaced with ``--overwrite`` only, and only if this program wrote it. A link is never followed.

    Raises:
        SurgeryError: it may not be.
    """
    if not os.path.lexists(path):
        return
    if path.is_dir() and not path.is_symlink():
        raise SurgeryError.at(path, f"is a folder; name a file by {option}")
    if not overwrite:
        raise SurgeryError.at(path, f"exists; choose another {option} or pass --overwrite")
    if not is_own_file(path):
        raise SurgeryError.at(path, f"was not written by surgery; move it away or choose another {option}")


def is_own_file(path: Path) -> bool:
    """Return whether a regular file carries the mark of this program or the signature of one of its formats."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_EDGE)
            file.seek(max(0, file.seek(0, os.SEEK_END) - _EDGE))
            tail = file.read()
    except OSError:
        return False
    return any(signature in part for signature in _SIGNATURES for part in (head, tail))


def is_unchanged(path: Path, digest: str) -> bool:
    """Return whether a regular file, no link, has the content of that SHA-256."""
    return not path.is_symlink() and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def owner(**facts: Any) -> dict[str, Any]:
    """Describe the running process, for the marker of what it leaves: program, user, process and time."""
    return {"program": PROGRAM, "user": _user(), "process": os.getpid(), "time": time.time(), **facts}


def is_own(marker: Any) -> bool:
    """Return whether a marker that was read from a file is one of this program and this user."""
    return isinstance(marker, dict) and marker.get("program") == PROGRAM and marker.get("user") == _user()


class Ledger:
    """The marker of a folder of unfinished work: who works there, and patterns of the files that they write.

    A line is added before its file is made, so that whatever a killed process leaves is listed.

    Args:
        path: of the marker.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: IO[str] | None = None
        self._patterns: set[str] = set()

    def open(self, file: IO[str]) -> None:
        """Begins to write as this process, at the end of an open file."""
        self._file = file
        self._write(owner())

    def close(self) -> None:
        """Ends writing; the caller closes the file."""
        self._file = None

    def claim(self, *patterns: str) -> None:
        """Announces files that are about to be written."""
        for pattern in patterns:
            if pattern not in self._patterns:
                self._write(pattern)
                self._patterns.add(pattern)

    def claim_files(self, *names: str) -> None:
        """Announces files by their exact names."""
        self.claim(*map(glob.escape, names))

    def owned(self) -> IsOwned:
        """Owns what is listed, without the ledger itself."""
        return matching(self._patterns | self._read())

    def _write(self, line: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _read(self) -> set[str]:
        """Patterns of all processes that worked here; none if another program or user did."""
        lines: list[Any] = []
        if not self.path.is_file():
            return set()
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue  # half a line, of a process that was killed
        owners = [line for line in lines if not isinstance(line, str)]
        return {line for line in lines if isinstance(line, str)} if owners and all(map(is_own, owners)) else set()


def _walk(folder: Path, is_owned: IsOwned) -> Iterator[tuple[str, bool]]:
    """Files, links and empty folders below a folder, and whether each is ours. No link is followed."""

    def below(place: Path, prefix: str) -> Iterator[tuple[str, bool]]:
        # Records and markers last: what an interrupted removal leaves is still listed.
        entries = sorted(os.scandir(place), key=lambda entry: (_is_record(entry.name), entry.name))
        for entry in entries:
            path = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from below(place / entry.name, f"{path}/")
            else:
                yield path, entry.is_file(follow_symlinks=False) and is_owned(path)
        if not entries and prefix:
            yield prefix, is_owned(prefix)

    yield from below(folder, "")


def _recorded(folder: Path, record: str, more: Iterable[str]) -> IsOwned | None:
    """Owns the files that a record lists, as they were written; None if there is no such list."""
    try:
        content = json.loads((folder / record).read_bytes())
        listed = {**content["files"], **(content.get("other_files") or {})}
        digests = {str(name): digest for name, digest in listed.items()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    by_name = matching([*map(glob.escape, digests), record, f"{HIDDEN}partial", *more])  # the ledger of a killed run
    unlisted = matching(() if "other_files" in content or record != RECORDS[0] else _UNLISTED)

    def is_owned(path: str) -> bool:
        if not by_name(path):
            return unlisted(path)
        digest = None if path.endswith("/") else digests.get(path)
        return digest is None or _hash(folder / path) in (digest, None)

    return is_owned


def _is_record(name: str) -> bool:
    return name in RECORDS or name.startswith(HIDDEN)


def _hash(path: Path) -> str | None:
    """SHA-256 of a file that is not large."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.stat().st_size <= _HASHED else None


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # holds something
            return


def _user() -> int | None:
    return os.getuid() if hasattr(os, "getuid") else None
