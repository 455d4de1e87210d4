"""HTML pages by Jinja2, with all values escaped except markup from this package's templates and renderers."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from surgery.common.tables.table import sort_key
from surgery.common.visible import visible

SHORT = 20
"""Length in characters up to which hyphenated words do not wrap; longer row names may exceed a phone's width."""
ARROWS = {"low": "\u00a0↓", "high": "\u00a0↑", None: ""}


def render(template: Path, **values: object) -> str:
    """Render a template, which may import `table.html`; invisible characters are escaped.

    The template can include other templates of its folder by name.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"arrows": ARROWS}
    environment.filters["sort_key"] = sort_key
    environment.filters["whole_words"] = _whole_words
    return visible(environment.get_template(template.name).render(values))


def _whole_words(text: str) -> Markup:
    """Prevent line breaks at the hyphens of short words such as top-1; CSS alone cannot."""
    span = Markup('<span class="whole">{}</span>')
    return Markup(" ").join(
        span.format(word) if "-" in word and len(word) <= SHORT else word for word in text.split(" ")
    )
