"""Start of a conversion and of its dry run: open the source, settle the output path, make the structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.calibration.settings import ConversionSettings
from surgery.checkpoint.output_place import settle_output
from surgery.common.progress import Progress
from surgery.running.unfused import open_model
from surgery.structures.base import Structure
from surgery.structures.kept_matrices import check_keepable
from surgery.structures.registry import target_of


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion as it was asked for.

    Attributes:
        source: local folder or file, or hub id.
        out: folder to write; None: next to the source, with what it became after its name.
        settings: their class says what the result is.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        restart: begin from scratch where an interrupted conversion could go on.
        keep_code: take over the source's code files, too.
        command: what the user typed, for the report.
        predicted: what a plan expected of it, for the report.
    """

    source: str | Path
    out: str | Path | None
    settings: ConversionSettings
    overwrite: bool = False
    allow_pickle: bool = False
    restart: bool = False
    keep_code: bool = False
    command: str = ""
    predicted: Mapping[str, Any] | None = None


def open_request(request: ConversionRequest, progress: Progress) -> tuple[Structure, Path]:
    """The structure that was asked for, over the opened source, and the folder to write.

    Raises:
        SurgeryError: whatever can be refused before any work.
    """
    source, settings = request.source, request.settings
    reader = open_model(source, allow_pickle=request.allow_pickle, dtype=settings.weights_dtype)
    target = target_of(settings)
    check_keepable(reader, settings)
    structure = target.structure().for_source(reader.config, settings)
    opened = structure.open(reader, settings)
    out = settle_output(source, reader.source, request.out, target.ending_of(settings), overwrite=request.overwrite)
    return structure.over(opened, settings, progress), out
