"""Pictures and pages as notebooks show them."""

from __future__ import annotations

import html
from pathlib import Path

from surgery.common.errors import SurgeryError
from surgery.common.ownership import MARK, check_file

PAGE_HEIGHT = 600
"""Height of a page in a notebook, in pixels; it scrolls."""


_MARKED = {"png": "Software", "svg": "Creator", "pdf": "Creator"}
"""Formats of pictures, and the field of their metadata that says who wrote them."""


def check_picture(path: Path) -> str:
    """The format of a picture, by its suffix.

    Raises:
        SurgeryError: it is none that carries a mark.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _MARKED:
        raise SurgeryError(f"--plot {path}: draws {', '.join(_MARKED)}; name a file of such an ending")
    return kind


def marking(kind: str) -> dict[str, str]:
    """Metadata by which a picture of a format is known as this program's."""
    return {_MARKED[kind]: MARK}


class _Text(str):
    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes it as a file.

        Args:
            overwrite: replace a file that this program wrote.

        Raises:
            SurgeryError: there is a file that may not be replaced, or it cannot be written.
        """
        path = Path(path)
        check_file(path, overwrite=overwrite, option="path")
        try:
            path.write_text(f"{self}\n<!-- {MARK} -->\n", encoding="utf-8")
        except OSError as error:
            raise SurgeryError.at(path, f"{error.strerror or error}") from None
        return path


class Svg(_Text):
    """An SVG picture: the text of one, which notebooks draw."""

    def _repr_svg_(self) -> str:
        return str(self)


class Page(_Text):
    """A whole HTML page: its text, which notebooks show in a frame of its own."""

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self)}" width="100%" height="{PAGE_HEIGHT}" frameborder="0"></iframe>'
