"""Files of a checkpoint prepared for publication: those that its report lists, without paths of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.file_hashes import hash_file
from surgery.checkpoint.file_kinds import CARD, REPORT, SOURCE_CARD, Kind, kind_of, list_files, summary
from surgery.checkpoint.hub import is_downloaded
from surgery.checkpoint.layout import is_hub_blob
from surgery.common.errors import SurgeryError
from surgery.common.lineage import lineage
from surgery.reporting.front_matter import of_source
from surgery.reporting.report import Report, read_report

_FOLDERS = re.compile(r"(?<![\w.:/~-])(?:~?/|[A-Za-z]:[/\\])(?:[^\s\"'`<>/\\]+[/\\])+")
"""Folders of an absolute path: they reveal how a user's machine is organized."""


@dataclass(frozen=True)
class Upload:
    """Checkpoint ready for upload: content, or path of an unchanged file, by name, and SHA-256 of the unchanged files.

    ``strays`` are names of files that the report does not list and that are not uploaded.
    """

    files: dict[str, bytes | Path]
    hashes: dict[str, str]
    strays: list[str]

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes by file name."""
        return {n: len(each) if isinstance(each, bytes) else each.stat().st_size for n, each in self.files.items()}


def prepare_upload(folder: Path, repo: str, base_model: str | None = None) -> Upload:
    """Read and verify the files of a checkpoint; remove the folders of absolute paths from records and source card.

    Args:
        repo: repository id, org/name, for the card.
        base_model: hub id of the source, for the card; None takes it from the report.

    Raises:
        SurgeryError: the folder has no report that lists its files, or a file is missing, modified or a link.
    """
    report = read_report(folder)
    if report is None:
        raise SurgeryError.at(folder, f"has no {REPORT}; use `hf upload` for other checkpoints")
    listed = report.get("files")
    if not isinstance(listed, dict) or not listed:
        raise SurgeryError.at(folder, f"its {REPORT} lists no files; convert again, or use `hf upload`")
    with disk_errors(folder):
        names = list_files(folder, hidden=True)
    if missing := [name for name in listed if name not in names and is_downloaded(name)]:
        raise SurgeryError.at(folder, f"{missing[0]} is missing; `surgery verify` checks all files")
    files: dict[str, bytes | Path] = {}
    hashes, published = {}, {}
    for name in (name for name in listed if name in names):
        path = _check_no_link(folder / name)
        if hash_file(path) != listed[name]:
            raise SurgeryError.at(path, "was changed after it was written; `surgery verify` checks all files")
        if kind_of(name) is Kind.RECORD:
            files[name] = _record_without_folders(path)
            published[name] = hashlib.sha256(files[name]).hexdigest()
        else:
            files[name], hashes[name] = path, listed[name]
    cleaned = {**_without_folders(report), "lineage": _lineage(report), "files": {**hashes, **published}}
    files[_check_no_link(folder / REPORT).name] = (json.dumps(cleaned, indent=2) + "\n").encode()
    if SOURCE_CARD in names:
        with disk_errors(folder):
            text = _check_no_link(folder / SOURCE_CARD).read_text(encoding="utf-8", errors="replace")
        files[SOURCE_CARD] = _FOLDERS.sub("", text).encode()
    card = Report.of(cleaned).card(repo, base_model=base_model, inherited=of_source(folder))
    files[CARD] = card.encode()
    return Upload(files, hashes, summary(name for name in names if name not in {*files, *listed}))


def _check_no_link(path: Path) -> Path:
    """Return the path unchanged. Raises SurgeryError: the path is a link to a file outside of the hub's cache."""
    if path.is_symlink() and not is_hub_blob(Path(os.path.realpath(path))):
        raise SurgeryError.at(path, "is a link, which is not uploaded; copy the file in its place")
    return path


def _record_without_folders(path: Path) -> bytes:
    """Return a JSON or JSONL file without the folders of absolute paths.

    Raises SurgeryError: it cannot be read.
    """
    try:
        with disk_errors(path):
            text = path.read_text(encoding="utf-8")
        values = [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    except (ValueError, RecursionError) as error:
        raise SurgeryError.at(path, f"not valid JSON ({error})") from None
    indent = None if path.suffix == ".jsonl" else 2
    return "".join(json.dumps(_without_folders(value), indent=indent) + "\n" for value in values).encode()


def _without_folders(value: Any) -> Any:
    """Remove the folders of absolute paths from a JSON value: ``/home/me/text.txt`` becomes ``text.txt``."""
    if isinstance(value, dict):
        return {_without_folders(name): _without_folders(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _lineage(report: dict[str, Any]) -> str | None:
    try:
        return lineage(report)
    except (KeyError, TypeError):
        return None
