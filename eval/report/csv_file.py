"""The report as a CSV file: one line a row, exact numbers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from surgery.common.errors import SurgeryError
from surgery.eval.report.tables import Report, Row, Value, columns, scalars

IDENTITY = ("name", "role", "path", "sha256", "class", "dtype")


def write(report: Report, path: Path) -> None:
    """Writes every row of `report`: what it is, its headline numbers with their intervals, then all of `scalars`.

    Numbers are written so that they read back bit for bit; cells without a value are empty. UTF-8, one header line.

    Raises:
        SurgeryError: the file cannot be written.
    """
    lines = [_line(row, report) for row in report["rows"]]
    fields = list(dict.fromkeys(key for line in lines for key in line))
    try:
        with open(path, "w", newline="", encoding="utf-8", errors="replace") as file:
            writer = csv.DictWriter(file, fields, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    except OSError as error:
        raise SurgeryError(f"cannot write {path}: {error.strerror}") from None


def _line(row: Row, report: Report) -> dict[str, Value]:
    line: dict[str, Value] = {key: row.get(key) for key in IDENTITY}
    line["variant"] = json.dumps(row["variant"], sort_keys=True) if row.get("variant") else None
    for column in columns(report):
        line[column.key] = column.value(row, report)
        change = column.change(row) or {}
        if column.compared:
            name = column.key if column.is_difference else f"{column.key}_change"
            line[name] = change.get("difference")
            line |= {f"{name}_{end}": change.get(end) for end in ("low", "high")}
    return line | scalars(row)
