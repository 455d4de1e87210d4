"""Saving of figures, atomically and with this program's mark. Callers import matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.disk import written_whole
from surgery.common.pictures import check_picture, marking

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path, **options: Any) -> Path:
    """Write a figure as png, svg or pdf, by the suffix.

    Raises:
        SurgeryError: the file cannot be written, or has another suffix.
    """
    kind = check_picture(path)
    with written_whole(path) as part:
        figure.savefig(part, format=kind, metadata=marking(kind), **options)
    return path
