"""Writes a report in all its forms: JSON, CSV, page, heat maps, wandb."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.eval.report import csv_file, markdown, page, tracking
from surgery.eval.report.document import Report
from surgery.eval.report.figures import save_needle_png

PART = ".report.partial"
"""Folder in which the files lie until all of them are written."""


def write_report(report: Report, folder: Path) -> list[Path]:
    """Writes report.json, .csv, .html and .md, and a needle heat map of each row that has one.

    Returns:
        What was written.

    Raises:
        SurgeryError: the folder cannot be written.
    """
    part = folder / PART
    with disk_errors(folder):
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir(parents=True)
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
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return [folder / path.name for path in (document, table, html, text, *pictures)]


def track(report: Report, folder: Path, project: str, mode: str) -> None:
    """Logs one wandb run a row; see `surgery.eval.report.tracking`."""
    tracking.log_to_wandb(report, project=project, mode=mode, folder=folder)
