"""Validated facts of the report next to a checkpoint, for ``surgery verify``. The report is untrusted input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors, read_json
from surgery.checkpoint.file_hashes import UNHASHED, hash_files
from surgery.checkpoint.file_kinds import READ_BY_LOADERS, REPORT, Kind, kind_of, list_files
from surgery.checkpoint.hub import is_downloaded
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.verification.probe import KEPT, TOKENS

LONGEST = 2**16
"""Upper bound of the recorded number of tokens in the caches; conversions read fewer."""


@dataclass(frozen=True)
class Recorded:
    """Facts of a report; each is None if missing.

    Attributes:
        there: whether there is a report.
        files: SHA-256 by file name.
        source_files: names of the source's files that were copied or left out, by kind.
        probe: see :func:`surgery.verification.probe.compute_probe`.
        kv: tokens in the live caches, and measured bytes per token.
    """

    there: bool = False
    files: dict[str, str] | None = None
    source_files: dict[str, list[str]] | None = None
    probe: dict[str, Any] | None = None
    kv: tuple[int, float] | None = None

    @classmethod
    def in_folder(cls, folder: Path) -> Recorded:
        """Read the report in a folder. Raises SurgeryError: the report is damaged."""
        path = folder / REPORT
        if not path.is_file():
            return cls()
        report = read_json(path)
        try:
            files, probe, kv = report.get("files"), report.get("probe"), report.get("kv")
            if files is not None:
                files = {name: str(digest) for name, digest in files.items()}
            source_files = report.get("source_files")
            if source_files is not None:
                source_files = {kind: [str(name) for name in names] for kind, names in source_files.items()}
            if probe is not None:
                _check_probe(probe)
            if kv is not None:
                kv = kv["measured_at_tokens"], float(kv["measured_bytes_per_token"])
                _check_integer(kv[0], 1, LONGEST)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SurgeryError.at(path, f"damaged ({type(error).__name__}: {error}); download it again") from None
        return cls(True, files or None, source_files, probe, kv)


def _check_probe(probe: dict[str, Any]) -> None:
    for token in (*probe["tokens"], *probe["ids"]):
        _check_integer(token, 0, 2**40)
    _check_integer(len(probe["tokens"]), 1, TOKENS)
    _check_integer(len(probe["logits"]), 1, KEPT)
    if probe["piece"] is not None:
        _check_integer(probe["piece"], 1, TOKENS)
    if any(type(each) not in (int, float) for each in (*probe["logits"], probe["spread"])):
        raise ValueError("logits are not numbers")
    if probe["dtype"] not in ("float64", "float32", "bfloat16"):
        raise ValueError("dtype is not one of conversions")


def _check_integer(value: Any, least: int, greatest: int) -> None:
    if type(value) is not int or not least <= value <= greatest:
        raise ValueError(f"{str(value)[:40]} is not a whole number from {least} to {greatest}")


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
