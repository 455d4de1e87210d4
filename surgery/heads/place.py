"""Output path of a pattern of heads, and the paths that it may not replace. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from surgery.checkpoint.output_place import default_output
from surgery.common.errors import SurgeryError
from surgery.common.ownership import check_file
from surgery.heads.settings import SUFFIX


def default_pattern(source: str | Path, method: str) -> Path:
    """Next to the source; in the working folder for a hub id."""
    return default_output(source, f"heads-{method}{SUFFIX}")


def check_pattern(out: Path, overwrite: bool) -> Path:
    """The path of the heat map next to a pattern.

    Raises:
        SurgeryError: one of the two may not be replaced, or the pattern's name has another ending.
    """
    if out.suffix != SUFFIX:
        raise SurgeryError(f"--out {out}: a pattern is a file of that ending, {out.name}{SUFFIX}")
    heat_map = out.with_suffix(".png")
    for path in (out, heat_map):
        check_file(path, overwrite=overwrite)
    return heat_map
