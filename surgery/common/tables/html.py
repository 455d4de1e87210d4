"""Pages by Jinja2: everything is escaped but what a template or a renderer of this package made."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from surgery.common.tables.table import sort_key

ARROWS = {"low": "\u00a0↓", "high": "\u00a0↑", None: ""}


def render(template: Path, **values: object) -> str:
    """A template, which may import `table.html`, filled in; text that UTF-8 cannot hold is replaced.

    Templates beside it can be included by their names.
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
    # A lone surrogate, which JSON can hold, cannot be written as UTF-8.
    return environment.get_template(template.name).render(values).encode("utf-8", "replace").decode("utf-8")
