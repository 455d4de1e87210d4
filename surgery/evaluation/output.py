"""Output of a report in all formats: JSON, CSV, HTML, Markdown, heat maps, wandb."""

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
"""Temporary folder that holds the files until all of them are written."""


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, .csv, .html and .md, and a needle heat map for each row that has one; return the paths.

    Raises SurgeryError: the folder cannot be written, or holds a foreign file with one of these names.
    """
    check_report_files(folder, [row["name"] for row in report["rows"]])
    part = folder / PART
    with disk_errors(folder):
        _clear(part)  # left by a killed process
        part.mkdir(parents=True, exist_ok=True)
        try:
            html, text, table, document = (part / f"report.{suffix}" for suffix in ("html", "md", "csv", "json"))
            write_whole(html, page.render(report))
            write_whole(text, markdown.render(report))
            csv_file.write(report, table)
            pictures = list(save_needle_png(report, part).values())
            write_whole(document, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            # The JSON comes last: if it exists, the other files do too.
            for path in (*pictures, text, html, table, document):
                path.replace(folder / path.name)
            paths = [folder / path.name for path in (document, table, html, text, *pictures)]
            ResultStore(folder).record_files(paths)  # before `part` is removed, which marks an unfinished report
        finally:
            _clear(part)
    return paths


def _clear(part: Path) -> None:
    """Remove this program's files from the temporary folder, and the folder once it is empty."""
    if part.is_dir() and not part.is_symlink():
        remove_owned(part, matching(("report.*", "*.png", ".*.partial")))


def check_report_files(folder: Path, rows: Sequence[str]) -> None:
    """Check that a report replaces only files that this program has written.

    Raises SurgeryError: a foreign file would be replaced.
    """
    names = [f"report.{suffix}" for suffix in ("html", "md", "csv", "json")]
    names += [name for number, row in enumerate(rows) for name in needle_names(row, number)]
    ResultStore(folder).check_files(names, DOCUMENT, unfinished=(folder / PART).is_dir())


def track(report: Report, folder: Path, project: str, mode: str) -> None:
    """Log one wandb run per row; see `surgery.eval.report.tracking`."""
    tracking.log_to_wandb(report, project=project, mode=mode, folder=folder)
