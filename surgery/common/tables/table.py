"""Table, wherever it is shown: columns that define how a value is read, and rows of plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

NONE = "-"


@dataclass(frozen=True)
class Column:
    """Column of a table, and how its values are read.

    Attributes:
        title: for people, short.
        about: the title in words, with the unit; empty where the title says it.
        form: how a value other than None is shown.
        better: which direction is good; None where there is no such thing.
        align: None: to the right if all values are numbers.
        key: stable name for machines; the title if it is empty.
    """

    title: str
    about: str = ""
    form: Callable[[Any], str] = str
    better: Literal["low", "high"] | None = None
    align: Literal["left", "right"] | None = None
    key: str = ""


@dataclass(frozen=True)
class Cell:
    """A value with something next to it.

    Attributes:
        value: exact; what files hold and pages sort by.
        below: small print, a line each.
        tone: "better", "worse" or "code"; of a row's first cell, the kind of the row.
        mark: a color that stands for the row in plots.
    """

    value: Any
    below: tuple[str, ...] = ()
    tone: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """Columns, and a row of values or `Cell`s for each line; a value that is None is missing."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, columns: Sequence[str | Column], rows, caption: str = "", notes: Sequence[str] = ()) -> Table:
        """A table in which a title stands for a column that has nothing else."""
        headings = [Column(column) if isinstance(column, str) else column for column in columns]
        return cls(headings, [tuple(row) for row in rows], caption, notes)

    def cells(self) -> list[list[Cell]]:
        """All values as cells, a list a row."""
        return [[value if isinstance(value, Cell) else Cell(value) for value in row] for row in self.rows]

    def text(self, index: int, cell: Cell) -> str:
        """Return the text of a cell's value in column `index`; a dash where there is none."""
        return NONE if cell.value is None else self.columns[index].form(cell.value)

    def texts(self) -> Iterator[list[str]]:
        """Yield the texts of each row, without the small print."""
        for row in self.cells():
            yield [self.text(index, cell) for index, cell in enumerate(row)]

    def alignments(self) -> list[Literal["left", "right"]]:
        """Return the alignment of each column: its own, or right if it is not the first and holds numbers only."""
        columns = list(zip(*self.texts(), strict=True)) or [()] * len(self.columns)
        return [
            column.align or ("right" if index and _numeric(texts) else "left")
            for index, (column, texts) in enumerate(zip(self.columns, columns, strict=True))
        ]


def sort_key(value: Any) -> Any:
    """Return the key by which a page sorts; values that are missing or not finite have none."""
    return NONE if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _numeric(texts: Sequence[str]) -> bool:
    return any(texts) and all(text == NONE or text.lstrip(">+\u2212-")[:1].isdigit() for text in texts if text)
