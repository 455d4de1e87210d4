"""Tables for terminals, rendered by rich."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as RichTable

from surgery.common.tables.table import Table


def render(table: Table, *, header: bool = True) -> RichTable:
    """Render a table for a rich console; small print stands below its value."""
    rich_table = RichTable(box=SIMPLE_HEAD, show_header=header, pad_edge=False, collapse_padding=True)
    for column, align in zip(table.columns, table.alignments(), strict=True):
        rich_table.add_column(escape(column.title), justify=align, overflow="fold")
    for cells, texts in zip(table.cells(), table.texts(), strict=True):
        rich_table.add_row(*(escape("\n".join((text, *cell.below))) for cell, text in zip(cells, texts, strict=True)))
    return rich_table
