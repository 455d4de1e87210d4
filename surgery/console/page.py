"""Printing to standard output: tables that fit the terminal, or one JSON object."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from surgery.checkpoint.named_models import name_of
from surgery.common.standard_output import leave_unread, printing
from surgery.common.tables import terminal
from surgery.common.tables.table import Column, Table
from surgery.common.visible import visible

# Page width for files and pipes, which have no width.
PLAIN_WIDTH = 120


def print_json(value: dict) -> None:
    """Print one JSON object to standard output."""
    with printing():
        sys.stdout.write(visible(json.dumps(value, indent=2, ensure_ascii=False)) + "\n")


class Page(Console):
    """Console that escapes control characters, which text from files may contain."""

    def print(self, *objects: Any, **options: Any) -> None:
        with printing():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        leave_unread()

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def new_page() -> Console:
    """Create a console for standard output, of fixed width unless it is a terminal, so that files are reproducible."""
    terminal = sys.stdout.isatty()
    return Page(width=None if terminal else PLAIN_WIDTH, highlight=False)


def show_title(name: str) -> None:
    """Print a name as the first line of a page."""
    new_page().print(f"\n[bold]{plain(name)}[/bold]")


def plain(text: object) -> str:
    """Escape square brackets, which rich reads as markup."""
    return escape(str(text))


def typed(source: str | Path) -> str:
    """Format a path or name for a command line: an alias, or relative to the working folder, quoted for a shell."""
    path = Path(name_of(str(source)))
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def make_table(columns: Sequence[str | Column], rows: Iterable[Sequence[Any]], *, header: bool = True) -> RichTable:
    """Build a rich table; columns without an alignment are aligned by their values."""
    return terminal.render(Table.of(columns, rows), header=header)
