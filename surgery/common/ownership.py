"""Files that this program may replace or remove. Needs no torch.

- A result folder is replaced only with ``--overwrite``, and only if its records (`RECORDS`) list every file in it.
- A single file is replaced only with ``--overwrite``.
- A folder of unfinished work (``<out>.partial``, ``<out>.healing``) belongs to this program, with all that it holds,
  while it contains the program's marker.

Everything else is refused, as are links.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from surgery.common.errors import SurgeryError

RECORDS = ("surgery_report.json", "surgery_healing.json", "heal.json")
"""Files whose entries ``files`` and ``other_files`` list a result folder's files by name."""

HIDDEN = ".surgery-"
"""Name prefix of this program's hidden files and folders."""

_UNLISTED = ("README.md", "README.source.md", "heal.jsonl")
"""Files missing, like those in ``adapter/``, from the reports of versions that did not write ``other_files``."""


def inventory(folder: Path, excluded: Iterable[str] = ()) -> list[str]:
    """List the files below a folder for a record, sorted, without our hidden files."""
    return sorted({name for name in _names(folder) if not name.startswith(HIDDEN)} - {*excluded})


def check_replaceable(folder: Path) -> None:
    """Check that a folder holds nothing but a result of this program and may be replaced.

    Raises SurgeryError: it holds another file; names the first.
    """
    foreign = first_foreign(folder)
    if foreign is not None:
        raise SurgeryError.at(
            folder, f"contains files that surgery did not write, first {foreign}; move it away or choose another --out"
        )


def first_foreign(folder: Path) -> str | None:
    """Return the first path below a folder that no record in it lists, or that is a link; None for our results."""
    listed, unlisted = {f"{HIDDEN}partial", f"{HIDDEN}lock"}, ()
    for record in RECORDS:
        try:
            content = json.loads((folder / record).read_bytes())
            listed |= {record, *content["files"], *(content.get("other_files") or ())}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            continue
        if record == RECORDS[0] and "other_files" not in content:
            listed, unlisted = listed | {*_UNLISTED}, ("adapter/",)
    return next(
        (
            name
            for name in sorted(_names(folder))
            if (folder / name).is_symlink() or not (name in listed or name.startswith(unlisted))
        ),
        None,
    )


def check_file(path: Path, *, overwrite: bool, option: str = "--out") -> None:
    """Check that a single output file may be written. This rule applies to the files of all commands.

    Raises SurgeryError: it exists without ``overwrite``, or is a folder or a link.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or path.is_dir():
        raise SurgeryError.at(path, f"is a folder or a link; pass a file with {option}")
    if not overwrite:
        raise SurgeryError.at(path, f"exists; choose another {option} or pass --overwrite")


def _names(folder: Path) -> Iterator[str]:
    """Yield the files, links and empty folders below a folder by relative path; folders end in a slash."""
    for root, folders, files in os.walk(folder):
        below = Path(root).relative_to(folder)
        yield from ((below / name).as_posix() for name in files)
        yield from ((below / name).as_posix() for name in folders if os.path.islink(os.path.join(root, name)))
        if not folders and not files and root != str(folder):
            yield f"{below.as_posix()}/"
