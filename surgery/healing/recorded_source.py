"""Lookup of a converted checkpoint's source by the name and hash in its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.hub import download
from surgery.checkpoint.named_models import BUILTIN, SMOLLM2, demo_model, smollm2
from surgery.common.errors import SurgeryError
from surgery.reporting.report import read_report


def find_source(converted: CheckpointReader) -> Path:
    """Find the source of a converted checkpoint: the original model, or the closest available stage after it.

    Reports hold names, not paths. The search covers folders and GGUF files of that name next to the checkpoint and in
    the working directory, named models, and the recorded hub revision. The recorded hash must match. Raises
    SurgeryError: there is no report, or no source with the recorded hash.
    """
    sources = [report["source"] for report in _reports(converted.path)]
    if not sources:
        raise SurgeryError.at(converted.path, "no report names its source; pass --teacher")
    for source in reversed(sources):
        for candidate in _candidate_paths(converted.source, source):
            if CheckpointReader.open(candidate).fingerprint() == source["sha256"]:
                return candidate
    origins = " or ".join(f"{source['path']} (sha256 {source['sha256'][:12]}...)" for source in reversed(sources))
    raise SurgeryError.at(
        converted.path,
        f"was made from {origins}, which is neither next to it nor in the working folder; pass --teacher",
    )


def _reports(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the report of a checkpoint, then that of its source, and so on to the first conversion."""
    report = read_report(folder)
    while report:
        yield report
        report = report.get("previous")


def _candidate_paths(converted: Path, source: dict[str, Any]) -> Iterator[Path]:
    """Yield existing paths of a source's name, and its download from the hub."""
    name, shipped = source["path"], demo_model()
    candidates = [converted.absolute().parent / name, Path(name).absolute()]
    candidates += [shipped] if name in (BUILTIN, shipped.name) else []
    if name.endswith(".gguf") or name == SMOLLM2:
        with suppress(SurgeryError):  # it is not installed
            candidates.append(smollm2())
    if "hub" in source:
        with suppress(SurgeryError):  # the hub is not reachable
            candidates.append(download(source["hub"], revision=source["revision"]))
    for candidate in dict.fromkeys(candidates):
        if candidate.exists() and candidate.resolve() != converted.resolve():
            yield candidate
