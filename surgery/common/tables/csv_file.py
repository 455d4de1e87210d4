"""Tables as CSV files, with exact values."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.tables.table import Table
from surgery.common.visible import visible


def write(table: Table, path: Path) -> None:
    """Write a table as UTF-8 CSV with a header row of column keys; missing values are empty.

    Numbers round-trip bit for bit. Text that spreadsheets would evaluate as a formula is prefixed with an apostrophe.
    Raises SurgeryError: the file cannot be written.
    """
    try:
        with open(path, "w", newline="", encoding="utf-8", errors="replace") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(column.key or column.title for column in table.columns)
            writer.writerows([_plain(cell.value) for cell in row] for row in table.cells())
    except OSError as error:
        raise SurgeryError(f"cannot write {path}: {error.strerror}") from None


def _plain(value: Any) -> Any:
    """Escape control characters and spreadsheet formulas in text; numbers, also as text, are unchanged."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    try:
        float(text)
        return text
    except ValueError:
        # https://owasp.org/www-community/attacks/CSV_Injection
        return f"'{text}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else text
