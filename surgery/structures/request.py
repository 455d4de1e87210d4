"""Start of a conversion or dry run: open the source, choose the output path, create the structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.calibration.settings import ConversionSettings
from surgery.checkpoint.output_path import settle_output
from surgery.common.progress import Progress
from surgery.running.unfused import open_model
from surgery.structures.base import Structure
from surgery.structures.registry import target_of


@dataclass(frozen=True)
class ConversionRequest:
    """Arguments of a conversion.

    Attributes:
        source: local folder or file, or hub id.
        out: output folder; None: next to the source, named after the source and the target.
        settings: settings, whose class determines the target.
        restart: start from scratch instead of resuming an interrupted conversion.
        keep_code: copy the source's code files, too.
        command, predicted: command line of the user, and predictions of `surgery plan`, for the report.
    """

    source: str | Path
    out: str | Path | None
    settings: ConversionSettings
    overwrite: bool = False
    restart: bool = False
    keep_code: bool = False
    command: str = ""
    predicted: Mapping[str, Any] | None = None


def open_request(request: ConversionRequest, progress: Progress) -> tuple[Structure, Path]:
    """Open the source; return the structure over it and the output folder.

    Raises SurgeryError: the request fails a check that needs no computation.
    """
    source, settings = request.source, request.settings
    reader = open_model(source, dtype=settings.weights_dtype)
    target = target_of(settings)
    structure = target.structure().for_source(reader.config, settings)
    opened = structure.open(reader, settings)
    out = settle_output(source, reader.source, request.out, target.ending_of(settings), overwrite=request.overwrite)
    return structure.over(opened, settings, progress), out
