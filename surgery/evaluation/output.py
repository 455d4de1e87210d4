"""Output of a report in all formats: JSON, CSV, HTML, Markdown, heat maps, wandb."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.common.errors import SurgeryError
from surgery.eval.report import csv_file, markdown, page, tracking
from surgery.eval.report.document import Report
from surgery.eval.report.figures import needle_names, save_needle_png
from surgery.evaluation.store import MARKER

DOCUMENT = "report.json"

PART = ".surgery-report"
"""Temporary folder that holds the files until all of them are written."""


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, .csv, .html and .md, and a needle heat map for each row that has one; return the paths.

    Raises SurgeryError: the folder cannot be written, or holds a foreign file with one of these names.
    """
    names = [needle for number, row in enumerate(report["rows"]) for needle in needle_names(row["name"], number)]
    _check_files(folder, [*(f"report.{suffix}" for suffix in ("html", "md", "csv", "json")), *names])
    part = folder / PART
    with disk_errors(folder):
        shutil.rmtree(part, ignore_errors=True)  # left by a killed process
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
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return paths


def _check_files(folder: Path, names: Sequence[str]) -> None:
    """Raise SurgeryError if a file exists in a folder that holds neither an evaluation nor its published report."""
    if (folder / MARKER).is_file() or _is_report(folder / DOCUMENT):
        return
    for path in (folder / name for name in names):
        if os.path.lexists(path):
            raise SurgeryError.at(path, "was not written by surgery; move it away")


def _is_report(path: Path) -> bool:
    """Return whether a document was written by this program, which always records its version."""
    try:
        return isinstance(json.loads(path.read_bytes())["surgery_version"], str) and not path.is_symlink()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def track(report: Report, folder: Path, project: str, mode: str) -> None:
    """Log one wandb run per row; see `surgery.eval.report.tracking`."""
    tracking.log_to_wandb(report, project=project, mode=mode, folder=folder)
