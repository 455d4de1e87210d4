"""Tables in Markdown."""

from __future__ import annotations

from surgery.common.human import in_markdown
from surgery.common.tables.table import Table


def render(table: Table) -> str:
    """Render a table as Markdown; small print follows a line break within its cell."""
    rules = ["---:" if align == "right" else "---" for align in table.alignments()]
    lines = [_line(in_markdown(column.title) for column in table.columns), f"|{'|'.join(rules)}|"]
    for cells, texts in zip(table.cells(), table.texts(), strict=True):
        below = [f" <br>{in_markdown(' '.join(cell.below))}" if cell.below else "" for cell in cells]
        lines.append(_line(in_markdown(text) + small for text, small in zip(texts, below, strict=True)))
    return "\n".join(lines)


def explanations(table: Table) -> str:
    """Render the explanations of the columns as a Markdown list."""
    return "\n".join(f"- {in_markdown(c.title)}: {in_markdown(c.about)}." for c in table.columns if c.about)


def _line(cells) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")
