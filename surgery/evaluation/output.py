"""Writes a report in all its forms: JSON, CSV, page, heat maps, wandb."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.common.ownership import matching, remove_owned
from surgery.eval.report import csv_file, markdown, page, tracking
from surgery.eval.report.document import Report
from surgery.eval.report.figures import needle_names, save_needle_png
from surgery.evaluation.store import ResultStore

DOCUMENT = "report.json"

PART = ".surgery-report"
"""Folder in which the files lie until all of them are written."""


def write_report(report: Report, folder: Path) -> list[Path]:
    """Writes report.json, .csv, .html and .md, and a needle heat map of each row that has one.

    Returns:
        What was written.

    Raises:
        SurgeryError: the folder cannot be written, or holds another file of such a name.
    """
    check_report_files(folder, [row["name"] for row in report["rows"]])
    part = folder / PART
    with disk_errors(folder):
        _clear(part)  # of a process that was killed
        part.mkdir(parents=True, exist_ok=True)
        try:
            html, text, table, document = (part / f"report.{suffix}" for suffix in ("html", "md", "csv", "json"))
            write_whole(html, page.render(report))
            write_whole(text, markdown.render(report))
            csv_file.write(report, table)
            pictures = list(save_needle_png(report, part).values())
            write_whole(document, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            # All or nothing, and the JSON last: where it is, the others are too.
            for path in (*pictures, text, html, table, document):
                path.replace(folder / path.name)
            paths = [folder / path.name for path in (document, table, html, text, *pictures)]
            ResultStore(folder).record_files(paths)  # while the folder still says that a report is being written
        finally:
            _clear(part)
    return paths


def _clear(part: Path) -> None:
    """Removes what this program writes into the folder of unfinished files, and the folder with the last of it."""
    if part.is_dir() and not part.is_symlink():
        remove_owned(part, matching(("report.*", "*.png", ".*.partial")))


def check_report_files(folder: Path, rows: Sequence[str]) -> None:
    """Refuses a folder in which a report would replace files that this program has not written.

    Raises:
        SurgeryError: it would, with the file's name.
    """
    names = [f"report.{suffix}" for suffix in ("html", "md", "csv", "json")]
    names += [name for number, row in enumerate(rows) for name in needle_names(row, number)]
    ResultStore(folder).check_files(names, DOCUMENT, unfinished=(folder / PART).is_dir())


def track(report: Report, folder: Path, project: str, mode: str) -> None:
    """Logs one wandb run a row; see `surgery.eval.report.tracking`."""
    tracking.log_to_wandb(report, project=project, mode=mode, folder=folder)
