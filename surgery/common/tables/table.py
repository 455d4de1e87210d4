"""Table independent of its output format: columns that format values, and rows of plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

NONE = "-"


@dataclass(frozen=True)
class Column:
    """Title, format and alignment of a table column.

    Attributes:
        title: short display title.
        about: explanation of the title, with the unit; empty if the title is clear.
        form: function that formats a value other than None.
        align: alignment; None: right if all values are numbers.
        key: stable machine-readable name; the title if empty.
    """

    title: str
    about: str = ""
    form: Callable[[Any], str] = str
    align: Literal["left", "right"] | None = None
    key: str = ""


@dataclass(frozen=True)
class Cell:
    """A value with lines of small print."""

    value: Any
    below: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """Columns, and rows of values or `Cell`s; None is a missing value."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, columns: Sequence[str | Column], rows) -> Table:
        """Build a table; a plain title stands for a column with default format."""
        headings = [Column(column) if isinstance(column, str) else column for column in columns]
        return cls(headings, [tuple(row) for row in rows])

    def cells(self) -> list[list[Cell]]:
        """Return the rows with all values wrapped as cells."""
        return [[value if isinstance(value, Cell) else Cell(value) for value in row] for row in self.rows]

    def text(self, index: int, cell: Cell) -> str:
        """Format a cell's value by column `index`; a dash for None."""
        return NONE if cell.value is None else self.columns[index].form(cell.value)

    def texts(self) -> Iterator[list[str]]:
        """Yield the formatted values of each row, without small print."""
        for row in self.cells():
            yield [self.text(index, cell) for index, cell in enumerate(row)]

    def alignments(self) -> list[Literal["left", "right"]]:
        """Return the alignment of each column: explicit, or right for columns after the first with numbers only."""
        columns = list(zip(*self.texts(), strict=True)) or [()] * len(self.columns)
        return [
            column.align or ("right" if index and _numeric(texts) else "left")
            for index, (column, texts) in enumerate(zip(self.columns, columns, strict=True))
        ]


def _numeric(texts: Sequence[str]) -> bool:
    return any(texts) and all(text == NONE or text.lstrip(">+\u2212-")[:1].isdigit() for text in texts if text)
