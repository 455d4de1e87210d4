"""Pictures and pages as notebooks show them."""

from __future__ import annotations

import html
from pathlib import Path

from surgery.common.errors import SurgeryError

PAGE_HEIGHT = 600
"""Of a page in a notebook, in pixels; it scrolls."""


class _Text(str):
    def save(self, path: str | Path) -> Path:
        """Writes it as a file.

        Raises:
            SurgeryError: it cannot be written.
        """
        path = Path(path)
        try:
            path.write_text(self, encoding="utf-8")
        except OSError as error:
            raise SurgeryError(f"{path}: {error.strerror or error}") from None
        return path


class Svg(_Text):
    """An SVG picture: the text of one, which notebooks draw."""

    def _repr_svg_(self) -> str:
        return str(self)


class Page(_Text):
    """A whole HTML page: its text, which notebooks show in a frame of its own."""

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self)}" width="100%" height="{PAGE_HEIGHT}" frameborder="0"></iframe>'
