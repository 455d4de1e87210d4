"""CSV export of a report: one line per row, unrounded values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surgery.common.tables import csv_file
from surgery.common.tables.table import Table
from surgery.eval.report.tables import Report, ReportRow, by_bytes, columns, scalars

IDENTITY = ("name", "role", "path", "sha256", "class", "dtype")


def write(report: Report, path: Path) -> None:
    """Write every row of `report`: identity, headline values with their intervals, and all `scalars`.

    Raises SurgeryError: the file cannot be written.
    """
    lines = [_line(row, report) for row in by_bytes(report)["rows"]]
    keys = list(dict.fromkeys(key for line in lines for key in line))
    csv_file.write(Table.of(keys, ([line.get(key) for key in keys] for line in lines)), path)


def _line(row: ReportRow, report: Report) -> dict[str, Any]:
    line: dict[str, Any] = {key: row.get(key) for key in IDENTITY}
    line["variant"] = json.dumps(row["variant"], sort_keys=True) if row.get("variant") else None
    for column in columns(report):
        line[column.key] = column.value(row, report)
        change = column.change(row) or {}
        if column.compared:
            name = column.key if column.is_difference else f"{column.key}_change"
            line[name] = change.get("difference")
            line |= {f"{name}_{end}": change.get(end) for end in ("low", "high")}
    return line | scalars(row)
