"""Writes a report in all its forms: JSON, CSV, page, heat maps, wandb."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from surgery.checkpoint.disk import write_whole
from surgery.eval.report import csv_file, markdown, page, tracking
from surgery.eval.report.document import Report
from surgery.eval.report.figures import needle_names, save_needle_png
from surgery.evaluation.store import ResultStore

DOCUMENT = "report.json"


def write_report(report: Report, folder: Path) -> list[Path]:
    """Writes report.json, .csv, .html and .md, and a needle heat map of each row that has one.

    Returns:
        What was written.

    Raises:
        SurgeryError: the folder cannot be written, or holds another file of such a name.
    """
    check_report_files(folder, [row["name"] for row in report["rows"]])
    # The JSON last: where it is, the others are too.
    html, text, table, document = (folder / f"report.{suffix}" for suffix in ("html", "md", "csv", "json"))
    write_whole(html, page.render(report))
    write_whole(text, markdown.render(report))
    csv_file.write(report, table)
    pictures = list(save_needle_png(report, folder).values())
    write_whole(document, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    written = [document, table, html, text, *pictures]
    ResultStore(folder).record_files(written)
    return written


def check_report_files(folder: Path, rows: Sequence[str]) -> None:
    """Refuses a folder in which a report would replace files that this program has not written.

    Raises:
        SurgeryError: it would, with the file's name.
    """
    names = [f"report.{suffix}" for suffix in ("html", "md", "csv", "json")]
    names += [name for number, row in enumerate(rows) for name in needle_names(row, number)]
    ResultStore(folder).check_files(names, DOCUMENT)


def track(report: Report, folder: Path, project: str, mode: str) -> None:
    """Logs one wandb run a row; see `surgery.eval.report.tracking`."""
    tracking.log_to_wandb(report, project=project, mode=mode, folder=folder)
