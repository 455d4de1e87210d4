"""How the verbs print: tables for people on a page that fits the terminal, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Where nobody says how wide the page is: a file, a pipe.
PLAIN_WIDTH = 120


def print_json(value: dict) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def new_page() -> Console:
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else PLAIN_WIDTH, highlight=False)


def plain(text: object) -> str:
    """Text in which square brackets are no markup."""
    return escape(str(text))


def make_table(
    columns: list[str], rows: Iterable[tuple], *, right: tuple[int, ...] | None = None, header: bool = True
) -> Table:
    """A table; all columns but the first are right-aligned where ``right`` names others or they hold numbers."""
    rows = [tuple(str(cell) for cell in row) for row in rows]
    table = Table(box=SIMPLE_HEAD, show_header=header, pad_edge=False)
    for index, name in enumerate(columns):
        to_the_right = index in right if right is not None else index and _numeric(row[index] for row in rows)
        table.add_column(name, justify="right" if to_the_right else "left")
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def _numeric(cells: Iterable[str]) -> bool:
    return all(cell == "-" or cell.lstrip(">")[:1].isdigit() for cell in cells if cell)
