"""Conversions that run only if their output does not exist yet."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from surgery.calibration.settings import ConversionSettings
from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.disk import as_json
from surgery.checkpoint.file_kinds import REPORT
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.heads.import_patterns import read_pattern
from surgery.structures import converter
from surgery.structures.request import ConversionRequest


def convert_unless_made(request: ConversionRequest, progress: Progress, *, remedy: str) -> None:
    """Convert, or print a note if the output exists with the same source and settings and may not be overwritten.

    Raises SurgeryError: the output path holds something else; ``remedy`` is the advice in the message.
    """
    if request.overwrite or not request.out.exists():
        converter.convert(request, progress=progress)
    elif is_conversion_of(request.out, request.source, request.settings):
        progress.note(f"{request.out}: exists already, skipped")
    else:
        raise SurgeryError.at(request.out, f"exists, but from another source or with other settings; {remedy}")


def is_conversion_of(out: Path, source: str | Path, settings: ConversionSettings) -> bool:
    """Return whether a folder holds the conversion of a source with these settings.

    Settings that are newer than the folder count as their defaults; settings that were removed since are ignored.
    """
    try:
        report = json.loads((out / REPORT).read_text(encoding="utf-8"))
        recorded = {field.name: report["settings"].get(field.name, field.default) for field in fields(settings)}
        paths = {"keep_statistics": settings.keep_statistics}
        same = as_json(recorded | paths) == as_json(settings.to_dict())
        same = same and report["source"]["sha256"] == CheckpointReader.open(source).fingerprint()
        if (heads := getattr(settings, "heads", None)) is not None:
            same = same and report["target"]["pattern"]["sha256"] == read_pattern(heads).sha256
        return same
    except (OSError, ValueError, KeyError, TypeError):
        return False
