"""What a conversion and its dry run begin with: the source opened, the output's place settled, the structure asked."""

from __future__ import annotations

from pathlib import Path

from surgery.architectures.cached import check_quantizable
from surgery.calibration.settings import ConversionSettings
from surgery.checkpoint.output_place import settle_output
from surgery.common.progress import Progress
from surgery.running.unfused import open_model
from surgery.structures.base import Structure
from surgery.structures.kept_matrices import check_keepable
from surgery.structures.registry import target_of


def open_request(
    source: str | Path,
    out: str | Path | None,
    settings: ConversionSettings,
    progress: Progress,
    *,
    overwrite: bool,
    allow_pickle: bool,
) -> tuple[Structure, Path]:
    """The structure that was asked for, over the opened source, and the folder to write.

    Raises:
        SurgeryError: whatever can be refused before any work.
    """
    reader, target = open_model(source, allow_pickle=allow_pickle), target_of(settings)
    check_keepable(reader, settings)
    structure = target.structure().for_source(reader.config, settings)
    opened = structure.open(reader, settings)
    if settings.quantizes:
        check_quantizable(reader.path, opened.config)
    out = settle_output(source, reader.source, out, target.ending_of(settings), overwrite=overwrite)
    return structure(opened, settings, progress), out
