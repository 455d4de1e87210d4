"""Printing: tables for people on a page that fits the terminal, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from surgery.common.standard_output import leave_unread, printing
from surgery.common.tables import terminal
from surgery.common.tables.table import Column, Table
from surgery.common.visible import visible

# Where nobody says how wide the page is: a file, a pipe.
PLAIN_WIDTH = 120


def print_json(value: dict) -> None:
    """One JSON object on standard output."""
    with printing():
        sys.stdout.write(visible(json.dumps(value, indent=2, ensure_ascii=False)) + "\n")


class Page(Console):
    """A console on which text commands nothing: what was read from files may hold control characters."""

    def print(self, *objects: Any, **options: Any) -> None:
        with printing():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        leave_unread()

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def new_page() -> Console:
    """Standard output, as wide as the terminal; of a fixed width where it is none, so that files do not differ."""
    terminal = sys.stdout.isatty()
    return Page(width=None if terminal else PLAIN_WIDTH, highlight=False)


def show_title(name: str) -> None:
    """Print a name, as the first line of a page."""
    new_page().print(f"\n[bold]{plain(name)}[/bold]")


def plain(text: object) -> str:
    """Text in which square brackets are no markup."""
    return escape(str(text))


def typed(path: Path) -> str:
    """A path as one would type it: from the working folder, if it lies in there."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def make_table(columns: Sequence[str | Column], rows: Iterable[Sequence[Any]], *, header: bool = True) -> RichTable:
    """A table for the page; what is right-aligned follows from its values, unless a column says it."""
    return terminal.render(Table.of(columns, rows), header=header)
