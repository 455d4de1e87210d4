"""Ownership: files that this program may replace or remove, by its own records of written files. Needs no torch.

- A result folder lists its files in a record: ``surgery_report.json``, ``surgery_healing.json`` or ``heal.json``. A
  single unlisted or edited file makes the whole folder the user's.
- A folder of unfinished work has a ledger that lists each file before it is written.
- A single file carries `MARK` or the signature of its format.

An unrecognized file is never touched; the error message names it. Links and empty folders always belong to the user.
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
"""Marker text in each single file that may be replaced: a comment, or metadata of the format."""

RECORDS = ("surgery_report.json", "surgery_healing.json", "heal.json")
"""Files whose ``files`` entry lists a result folder's files with hashes, and ``other_files`` the editable ones."""

HIDDEN = ".surgery-"
"""Name prefix of this program's hidden files and folders."""

_SIGNATURES = (MARK.encode(), b'"surgery_heads"', b"# surgery convert ", b'"command": "surgery bench')
_EDGE = 2**16
_HASHED = 2**25
"""Size limit in bytes for hashing. Larger files are weights, compared by name only: reading them takes minutes."""
_UNLISTED = ("README.md", "README.source.md", "heal.jsonl", "adapter/*")
"""Files missing from the records of versions that did not write ``other_files``."""

IsOwned = Callable[[str], bool]
"""Predicate: did this program write this relative path? Paths use slashes; those of folders end in a slash."""


def matching(patterns: Iterable[str]) -> IsOwned:
    """Return a predicate that owns paths matching a pattern, compared part by part, and their parent folders."""
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
    """Return a predicate that applies another predicate inside each named folder, and ``is_owned`` elsewhere."""

    def both(path: str) -> bool:
        first, _, rest = path.partition("/")
        return (not rest or folders[first](rest)) if first in folders and "/" in path else is_owned(path)

    return both


def first_foreign(folder: Path, is_owned: IsOwned) -> str | None:
    """Return the first path below a folder that this program did not write, be it a file, a link or an empty folder."""
    return next((path for path, is_ours in _walk(folder, is_owned) if not is_ours), None)


def remove_owned(folder: Path, is_owned: IsOwned) -> str | None:
    """Remove this program's files below a folder, and the folder itself if nothing remains.

    Returns the first path that stays because this program did not write it; None if the folder is gone.
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


def inventory(folder: Path, excluded: Iterable[str] = ()) -> dict[str, str | None]:
    """Hash the files below a folder for a record: SHA-256 by path, None for large files. Skip our hidden files."""
    excluded = set(excluded)
    paths = (path for path, _ in _walk(folder, lambda path: True) if not path.endswith("/"))
    return {
        path: _hash(folder / path) for path in sorted(paths) if path not in excluded and not path.startswith(HIDDEN)
    }


def check_replaceable(folder: Path) -> None:
    """Check that a folder holds nothing but a result of this program and may be replaced.

    Raises SurgeryError: it holds another file; names the first.
    """
    _, foreign = owned_result(folder)
    if foreign is not None:
        raise SurgeryError.at(
            folder, f"contains files that surgery did not write, first {foreign}; move it away or choose another --out"
        )


def owned_result(folder: Path, *more: str) -> tuple[IsOwned, str | None]:
    """Return a predicate that owns a result folder's files, and ``more`` names, and the first path that is not ours."""
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
    """Check that a single output file may be written. This rule applies to the files of all commands.

    An existing file is replaced only with ``--overwrite``, and only if this program wrote it. Links are not followed.
    Raises SurgeryError: the file may not be written.
    """
    if not os.path.lexists(path):
        return
    if path.is_dir() and not path.is_symlink():
        raise SurgeryError.at(path, f"is a folder; pass a file with {option}")
    if not overwrite:
        raise SurgeryError.at(path, f"exists; choose another {option} or pass --overwrite")
    if not is_own_file(path):
        raise SurgeryError.at(path, f"was not written by surgery; move it away or choose another {option}")


def is_own_file(path: Path) -> bool:
    """Return whether a regular file carries this program's mark or the signature of one of its formats."""
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
    """Return whether a path is a regular file, not a link, whose content has this SHA-256."""
    return not path.is_symlink() and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def owner() -> dict[str, Any]:
    """Build an ownership marker for the running process: program, user, process id and time."""
    return {"program": PROGRAM, "user": os.getuid(), "process": os.getpid(), "time": time.time()}


def is_own(marker: Any) -> bool:
    """Return whether a marker read from a file names this program and the current user."""
    return isinstance(marker, dict) and marker.get("program") == PROGRAM and marker.get("user") == os.getuid()


class Ledger:
    """Ledger of a folder of unfinished work: the processes that write there, and patterns of their files.

    A line is written before its file is created, so that the ledger lists every file that a killed process leaves.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file: IO[str] | None = None
        self._patterns: set[str] = set()

    def open(self, file: IO[str]) -> None:
        """Register this process and append its claims to an open file."""
        self._file = file
        self._write(owner())

    def close(self) -> None:
        """Stop writing; the caller closes the file."""
        self._file = None

    def claim(self, *patterns: str) -> None:
        """Record patterns of files that are about to be written."""
        for pattern in patterns:
            if pattern not in self._patterns:
                self._write(pattern)
                self._patterns.add(pattern)

    def claim_files(self, *names: str) -> None:
        """Record files that are about to be written, by exact name."""
        self.claim(*map(glob.escape, names))

    def owned(self) -> IsOwned:
        """Return a predicate that owns the listed files, but not the ledger itself."""
        return matching(self._patterns | self._read())

    def _write(self, line: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _read(self) -> set[str]:
        """Read the patterns of all processes; empty if another program or user also wrote here."""
        lines: list[Any] = []
        if not self.path.is_file():
            return set()
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue  # incomplete line of a killed process
        owners = [line for line in lines if not isinstance(line, str)]
        return {line for line in lines if isinstance(line, str)} if owners and all(map(is_own, owners)) else set()


def _walk(folder: Path, is_owned: IsOwned) -> Iterator[tuple[str, bool]]:
    """Yield the files, links and empty folders below a folder, and whether each is ours. Does not follow links."""

    def below(current: Path, prefix: str) -> Iterator[tuple[str, bool]]:
        # Records and markers last: after an interrupted removal they still list the remaining files.
        entries = sorted(os.scandir(current), key=lambda entry: (_is_record(entry.name), entry.name))
        for entry in entries:
            path = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from below(current / entry.name, f"{path}/")
            else:
                yield path, entry.is_file(follow_symlinks=False) and is_owned(path)
        if not entries and prefix:
            yield prefix, is_owned(prefix)

    yield from below(folder, "")


def _recorded(folder: Path, record: str, more: Iterable[str]) -> IsOwned | None:
    """Return a predicate that owns the unedited files of a record; None if there is no valid record."""
    try:
        content = json.loads((folder / record).read_bytes())
        listed = {**content["files"], **(content.get("other_files") or {})}
        digests = {str(name): digest for name, digest in listed.items()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    # `HIDDEN`partial is the ledger of a killed run.
    by_name = matching([*map(glob.escape, digests), record, f"{HIDDEN}partial", *more])
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
    """Return the SHA-256 of a file; None above `_HASHED` bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.stat().st_size <= _HASHED else None


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # not empty
            return
