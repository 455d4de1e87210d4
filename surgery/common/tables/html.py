"""Pages by Jinja2: everything is escaped but what a template or a renderer of this package made."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from surgery.common.tables.table import sort_key
from surgery.common.visible import visible

SHORT = 20
"""Characters of a word that is not broken; names of rows, which are titles too, can be wider than a phone."""
ARROWS = {"low": "\u00a0↓", "high": "\u00a0↑", None: ""}


def render(template: Path, **values: object) -> str:
    """A template, which may import `table.html`, filled in; characters that are not to be seen are escaped.

    Templates next to it can be included by their names.
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
    """Text that breaks between words: browsers would break top-1 at its hyphen, and no style forbids that alone."""
    span = Markup('<span class="whole">{}</span>')
    return Markup(" ").join(
        span.format(word) if "-" in word and len(word) <= SHORT else word for word in text.split(" ")
    )
