"""Files of a checkpoint prepared for publication: those that its report lists, without paths of this machine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
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
from surgery.common.private_paths import settings_without_folders, text_without_folders, without_folders
from surgery.reporting.front_matter import of_source
from surgery.reporting.report import Report, read_report

IN_MEMORY = 2**24
"""Bytes above which a file is uploaded from disk; the hub verifies its content against the hash."""
_VOCABULARIES = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json", "chat_template.json")


@dataclass(frozen=True)
class Upload:
    """Checkpoint ready for upload: content by file name, or the path and SHA-256 of large files.

    ``fields`` are published values of entries that contained paths, and of commands, by file and entry; ``strays`` are
    names of files that the report does not list and that are not uploaded.
    """

    files: dict[str, bytes | Path]
    hashes: dict[str, str]
    fields: dict[str, str]
    strays: list[str]

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes by file name."""
        return {n: len(each) if isinstance(each, bytes) else each.stat().st_size for n, each in self.files.items()}


def prepare_upload(folder: Path, repo: str, base_model: str | None = None) -> Upload:
    """Read and verify the files of a checkpoint, and remove local paths from them.

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
    published, fields = {}, {}
    for name in (name for name in listed if name in names):
        files[name] = _verified_content(folder / name, listed[name], in_memory=_may_hold_paths(name))
        published[name] = listed[name]
        if isinstance(content := files[name], bytes):
            files[name], changed = _without_folders(name, content)
            published[name] = hashlib.sha256(files[name]).hexdigest()
            fields |= changed
    hashes = {name: published[name] for name, content in files.items() if isinstance(content, Path)}
    cleaned = {**without_folders(report), "lineage": _lineage(report), "files": published}
    changes = _changes({**report, "files": published}, cleaned)
    fields |= {f"{REPORT}: {entry}": value for entry, value in (*changes, ("command", str(cleaned.get("command"))))}
    files[_check_no_link(folder / REPORT).name] = (json.dumps(cleaned, indent=2) + "\n").encode()
    if SOURCE_CARD in names:
        with disk_errors(folder):
            text = _check_no_link(folder / SOURCE_CARD).read_text(encoding="utf-8", errors="replace")
        files[SOURCE_CARD] = text_without_folders(text).encode()
    card = Report.of(cleaned).card(repo, base_model=base_model, inherited=of_source(folder))
    files[CARD] = card.encode()
    return Upload(files, hashes, fields, summary(name for name in names if name not in {*files, *listed}))


def _verified_content(path: Path, sha256: str, *, in_memory: bool) -> bytes | Path:
    """Return the content of a file, or the path of a large one, after checking its hash.

    Raises SurgeryError: the hash differs from the report's, or the file is a link.
    """
    _check_no_link(path)
    with disk_errors(path):
        large = path.stat().st_size > IN_MEMORY and not in_memory
        content = path if large else path.read_bytes()
        digest = hash_file(path) if large else hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise SurgeryError.at(path, "was changed after it was written; `surgery verify` checks all files")
    return content


def _check_no_link(path: Path) -> Path:
    """Return the path unchanged. Raises SurgeryError: the path is a link to a file outside of the hub's cache."""
    if path.is_symlink() and not is_hub_blob(Path(os.path.realpath(path))):
        raise SurgeryError.at(path, "is a link, which is not uploaded; copy the file in its place")
    return path


def _without_folders(name: str, content: bytes) -> tuple[bytes, dict[str, str]]:
    """Remove folders from the paths in a JSON file or log; return the new content and the changed entries."""
    if not _may_hold_paths(name):
        return content, {}
    clean = without_folders if kind_of(name) is Kind.RECORD else settings_without_folders
    try:
        lines = content.splitlines() if name.endswith(".jsonl") else [content]
        values = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        return content, {}
    cleaned = [clean(value) for value in values]
    changes = {f"{name}: {entry}": new for pair in zip(values, cleaned, strict=True) for entry, new in _changes(*pair)}
    if cleaned == values:
        return content, {}
    indent = None if name.endswith(".jsonl") else 2
    return "".join(json.dumps(value, indent=indent, ensure_ascii=False) + "\n" for value in cleaned).encode(), changes


def _may_hold_paths(name: str) -> bool:
    """Return whether a file is JSON other than a vocabulary or the index of the weights."""
    return name.endswith((".json", ".jsonl")) and name not in _VOCABULARIES and not name.endswith(".index.json")


def _lineage(report: dict[str, Any]) -> str | None:
    try:
        return lineage(report)
    except (KeyError, TypeError):
        return None


def _changes(before: Any, after: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and new text of the entries that differ between two JSON values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for (name, old), new in zip(before.items(), after.values(), strict=False):
            yield from _changes(old, new, f"{at}.{name}" if at else name)
    elif isinstance(before, list) and isinstance(after, list):
        for number, (old, new) in enumerate(zip(before, after, strict=False)):
            yield from _changes(old, new, f"{at}[{number}]")
    elif before != after:
        yield at, str(after)
