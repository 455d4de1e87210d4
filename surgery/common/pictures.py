"""Pictures that notebooks display."""

from __future__ import annotations

from pathlib import Path

from surgery.common.errors import SurgeryError
from surgery.common.ownership import check_file

_KINDS = ("png", "svg", "pdf")


def check_picture(path: Path) -> str:
    """Return the picture format for a path's suffix.

    Raises SurgeryError: the format is not supported.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _KINDS:
        raise SurgeryError(f"--plot {path}: unknown file type; choose one of {', '.join(_KINDS)}")
    return kind


class Svg(str):
    """SVG source text that notebooks render as a picture."""

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the text to a file; ``overwrite`` replaces an existing one.

        Raises SurgeryError: an existing file may not be replaced, or the file cannot be written.
        """
        path = Path(path)
        check_file(path, overwrite=overwrite, option="path")
        try:
            path.write_text(f"{self}\n", encoding="utf-8")
        except OSError as error:
            raise SurgeryError.at(path, f"{error.strerror or error}") from None
        return path

    def _repr_svg_(self) -> str:
        return str(self)
