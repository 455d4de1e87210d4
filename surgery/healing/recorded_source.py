"""The checkpoint that another was made from, found again by what its report says: a name and a hash of the weights."""

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
    """The source of a converted checkpoint: the one that was converted first, or the nearest to it that is here.

    Reports hold names, not places. Looked at are folders and GGUF files of that name next to the checkpoint and in the
    working folder, and the models that can be called by a name; what is taken has the recorded hash.

    Raises:
        SurgeryError: there is no report, or no such source here.
    """
    sources = [report["source"] for report in _reports(converted.path)]
    if not sources:
        raise SurgeryError.at(converted.path, "no report says what it was made from; name a teacher")
    for source in reversed(sources):
        for place in _places(converted.source, source):
            if CheckpointReader.open(place).fingerprint() == source["sha256"]:
                return place
    origins = " or ".join(f"{source['path']} (sha256 {source['sha256'][:12]}...)" for source in reversed(sources))
    raise SurgeryError.at(
        converted.path,
        f"was made from {origins}, which is neither next to it nor in the working folder. name a teacher",
    )


def _reports(folder: Path) -> Iterator[dict[str, Any]]:
    """The report of a checkpoint, then that of its source, and so on to the first conversion."""
    report = read_report(folder)
    while report:
        yield report
        report = report.get("previous")


def _places(converted: Path, source: dict[str, Any]) -> Iterator[Path]:
    """Yield the paths at which a source of that name may be; only existing ones, or one on the hub."""
    name, shipped = source["path"], demo_model()
    candidates = [converted.absolute().parent / name, Path(name).absolute()]
    candidates += [shipped] if name in (BUILTIN, shipped.name) else []
    if name.endswith(".gguf") or name == SMOLLM2:
        with suppress(SurgeryError):  # where it is not installed
            candidates.append(smollm2())
    if "hub" in source:
        with suppress(SurgeryError):  # where it is not reachable
            candidates.append(download(source["hub"], revision=source["revision"], allow_pickle=False))
    for place in dict.fromkeys(candidates):
        if place.exists() and place.resolve() != converted.resolve():
            yield place
