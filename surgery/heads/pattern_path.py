"""Output paths of a pattern and its heat map. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from surgery.checkpoint.output_path import default_output
from surgery.common.errors import SurgeryError
from surgery.common.ownership import check_file
from surgery.heads.settings import SUFFIX


def default_pattern(source: str | Path, method: str) -> Path:
    """Return the default output path: next to the source, or in the working folder for a hub id."""
    return default_output(source, f"heads-{method}{SUFFIX}")


def check_pattern(out: Path, overwrite: bool) -> Path:
    """Check the output path of a pattern and return that of its heat map.

    Raises SurgeryError: either file exists and may not be replaced, or the pattern's suffix is not ``.safetensors``.
    """
    if out.suffix != SUFFIX:
        raise SurgeryError(f"--out {out}: must end in {SUFFIX}, such as {out.name}{SUFFIX}")
    heat_map = out.with_suffix(".png")
    for path in (out, heat_map):
        check_file(path, overwrite=overwrite)
    return heat_map
