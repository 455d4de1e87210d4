"""Output of a report: JSON, Markdown, plots, wandb."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.common.errors import SurgeryError
from surgery.eval.report import markdown, tracking
from surgery.eval.report.document import Report
from surgery.eval.report.figures import PLOTS, save_plots
from surgery.evaluation.store import MARKER

DOCUMENT = "report.json"

FILES = (DOCUMENT, "report.md", *(f"{key}.svg" for key in PLOTS), "report.html", "report.csv")
"""Files that a report replaces or removes; those of the last two kinds are of earlier versions."""

PART = ".surgery-report"
"""Temporary folder that holds the files until all of them are written."""


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.md and its plots, and remove other files of an earlier report; return the paths.

    Raises SurgeryError: the folder cannot be written, or holds a foreign file with one of these names.
    """
    check_report_files(folder)
    part = folder / PART
    with disk_errors(folder):
        shutil.rmtree(part, ignore_errors=True)  # left by a killed process
        part.mkdir(parents=True, exist_ok=True)
        try:
            plots = save_plots(report, part)
            write_whole(part / "report.md", markdown.render(report, plots))
            write_whole(part / DOCUMENT, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            names = [DOCUMENT, "report.md", *(path.name for path in plots.values())]
            # The JSON comes last: if it exists, the other files do too.
            for name in reversed(names):
                (part / name).replace(folder / name)
            for name in set(FILES) - set(names):
                (folder / name).unlink(missing_ok=True)
            paths = [folder / name for name in names]
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return paths


def check_report_files(folder: Path) -> None:
    """Check that a report replaces only files of an evaluation or of its published report.

    Raises SurgeryError: a foreign file would be replaced.
    """
    if (folder / MARKER).is_file() or _is_report(folder / DOCUMENT):
        return
    for path in (folder / name for name in FILES):
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
