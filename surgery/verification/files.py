"""Comparison of a checkpoint's files with its report: no other file may change what the checkpoint computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.file_hashes import UNHASHED, hash_files
from surgery.checkpoint.file_kinds import READ_BY_LOADERS, Kind, kind_of, list_files
from surgery.checkpoint.hub import is_downloaded
from surgery.common.progress import Progress

GIT = ".git/"
EARLIER = ("adapter/adapter_model.safetensors", "adapter/README.md")
"""Files of healings by earlier versions, which their reports do not list; no loader reads them by default."""


@dataclass(frozen=True)
class FileComparison:
    """Differences between a folder's files and its report: missing, but for those that downloads omit, and changed.

    ``unlisted`` has the kinds of other files by name; `.git/` stands for all files in it.
    """

    missing: tuple[str, ...]
    changed: tuple[str, ...]
    unlisted: dict[str, Kind]

    @property
    def refused(self) -> dict[str, Kind]:
        """Unlisted files that loaders read or execute."""
        return {name: kind for name, kind in self.unlisted.items() if kind in READ_BY_LOADERS}


def compare_files(folder: Path, listed: Mapping[str, str], progress: Progress | None = None) -> FileComparison:
    """Compare a folder with the hashes in its report. Raises SurgeryError: a file cannot be read."""
    with disk_errors(folder):
        names = list_files(folder, hidden=True)
        present_names = {name for name in names if name in listed and (folder / name).is_file()}
    digests = hash_files(folder, progress, sorted(present_names))
    strays = [GIT if name.startswith(GIT) else name for name in names if name not in listed and name not in UNHASHED]
    return FileComparison(
        tuple(sorted(name for name in listed if name not in present_names and is_downloaded(name))),
        tuple(sorted(name for name in present_names if digests[name] != listed[name])),
        {name: _kind(name) for name in dict.fromkeys(strays)},
    )


def _kind(name: str) -> Kind:
    return Kind.OTHER if name in (GIT, *EARLIER) else kind_of(name)
