"""Disk utilities: sizes, complete reads, atomic writes, flushing, and one-line disk errors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, BinaryIO

from surgery.common.errors import SurgeryError
from surgery.common.file_lock import hold, is_at
from surgery.common.temporary import OTHER_TEMPORARY, is_temporary

_PART = ".surgery-partial"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: int | str, name: str = "") -> int:
    """Parse a size in bytes: ``5GB``, ``500 MB`` (decimal), ``5GiB``, ``500MiB`` (binary) or a plain number.

    Raises SurgeryError about the setting ``name``: the text is not a size, or is not positive.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", str(size))
    try:
        count = int(Decimal(match[1]) * _UNITS[match[2].upper()]) if match else 0
    except (KeyError, InvalidOperation):
        count = 0
    if count <= 0:
        setting = f"{name} {size!r}".lstrip()
        raise SurgeryError(
            f"{setting} is not a size; write it like 5GB, 500MB, 2GiB or a number of bytes", setting=name or None
        )
    return count


def check_encoding(path: Path) -> None:
    """Check that Rust libraries such as safetensors and tokenizers can open a path.

    Raises SurgeryError: the path is not valid UTF-8.
    """
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise SurgeryError.at(path, "the path is not valid UTF-8, which safetensors requires; rename it") from None


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert an OSError of the block, which works on ``path``, to a one-line SurgeryError."""
    try:
        yield
    except OSError as error:
        # numpy reports a short write without errno: "360448 requested and 197216 written".
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or " requested and " in str(error):
            other = other_disk(path)
            raise SurgeryError.at(path, f"no space left on the disk; free some or {other}", hint=other) from error
        raise SurgeryError(f"{error.filename or path}: {error.strerror or error}") from error


def other_disk(path: Path) -> str:
    """Return the advice for a path whose disk is full; only commands with an output have --out."""
    return OTHER_TEMPORARY if is_temporary(path) else "choose another --out"


def as_json(values: Any) -> Any:
    """Return values after a JSON round trip: lists for tuples, strings as keys."""
    return json.loads(json.dumps(values))


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON file as :func:`read_json` does; an empty object if there is no such file."""
    return read_json(path) if path.exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises SurgeryError: the file cannot be read, is not JSON, or holds something other than an object.
    """
    with disk_errors(path):
        content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SurgeryError.at(path, f"not valid JSON ({error}); repair it or download it again") from error
    if not isinstance(value, dict):
        raise SurgeryError.at(
            path, f"holds a JSON {type(value).__name__}, not an object; repair it or download it again"
        )
    return value


def read_exactly(file: BinaryIO, view: memoryview) -> bool:
    """Fill ``view`` from an unbuffered file; False if the file ends early."""
    # A read returns at most 2 GiB.
    while len(view):
        count = file.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def write_at(path: Path, offset: int, view: memoryview) -> None:
    """Write all of ``view`` into an existing file at a byte offset."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        while len(view):
            view = view[os.write(file.fileno(), view) :]


def sync_tree(folder: Path) -> None:
    """Flush a folder and every file and folder below it to disk."""
    for root, _, files in os.walk(folder):
        for file in files:
            with open(Path(root, file), "r+b") as handle:
                os.fsync(handle.fileno())
        sync_folder(Path(root))


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, so that new names survive a power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is flushed and renamed to ``path`` at the end, or removed if the block fails.

    It is hidden next to ``path`` and locked; the next write replaces that of a killed process. Raises SurgeryError: a
    disk error occurs, or another process is writing the file.
    """
    part = path.with_name(f".{path.name}{_PART}")
    lock = None
    try:
        with disk_errors(path):
            try:
                lock = hold(part, path)
                os.truncate(part, 0)
                yield part
                with part.open("r+b") as file:
                    os.fsync(file.fileno())
                part.replace(path)
                sync_folder(path.parent)
            except OSError as error:
                if str(error.filename) == str(part):
                    error.filename = str(path)
                raise
    finally:
        if lock is not None:
            with lock, contextlib.suppress(OSError):
                if is_at(lock, part):
                    part.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically. Raises SurgeryError: the file cannot be written."""
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8", errors="replace")  # JSON can contain lone surrogates


def tree_bytes(folder: Path) -> int:
    """Return the disk usage in bytes of the files below a folder; holes of sparse files do not count."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            total += os.lstat(os.path.join(root, file)).st_blocks * 512
    return total


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist yet."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free
