"""Page sections other than measurements: completions, conversions, settings, checkpoints and times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surgery.common.human import duration, size
from surgery.common.tables.table import NONE, Cell, Column, Table
from surgery.eval.report.page_tables import name_cell, of_rows
from surgery.eval.report.tables import Report, dig


def completions(report: Report) -> dict[str, list[tuple[Cell, str]]]:
    """Group the rows' completions by prompt."""
    texts: dict[str, list[tuple[Cell, str]]] = {}
    for row in report["rows"]:
        for one in dig(row, "results", "generate", "completions") or []:
            texts.setdefault(one["prompt"], []).append((name_cell(report, row), one["text"]))
    return texts


def conversions(report: Report) -> Table | None:
    """Build the table of conversions: method, command, time, peak memory and healing run of each."""
    lines = []
    for row in report["rows"]:
        if conversion := row.get("conversion"):
            what = " ".join(str(conversion[key]) for key in ("to", "method") if conversion.get(key)) or NONE
            healed = healing_run(conversion) or (NONE if not conversion.get("healing") else "yes")
            command = Cell(conversion.get("command"), tone="code")
            lines.append((row, [what, conversion.get("seconds"), conversion.get("peak_memory_bytes"), healed, command]))
    columns = ["conversion", Column("time", "", duration), Column("peak memory", "", size)]
    return of_rows(report, [*columns, Column("healing run", "Run of wandb"), "command"], lines, "How rows were made")


def healing_run(conversion: dict) -> str | None:
    """Return ``entity/project/run_id`` of the wandb run that healed a checkpoint; None without one."""
    run = dig(conversion, "healing", "wandb") or {}
    if not run.get("run_id"):
        return None
    return "/".join(str(run[key]) for key in ("entity", "project", "run_id") if run.get(key))


def facts(report: Report) -> dict[str, list[tuple[str, str]]]:
    """Collect settings, tasks with their data hashes, and environment as (key, text) pairs by block title."""
    blocks = {
        "Settings": report.get("settings"),
        "Environment": report.get("environment"),
        "Tokenizer": report.get("tokenizer"),
        **{f"Task {name}": values for name, values in (report.get("tasks") or {}).items()},
        **{f"Merged from {part.get('report')}": part for part in report.get("merged_from") or []},
    }
    return {title: [(key, _as_text(v)) for key, v in flattened(values)] for title, values in blocks.items() if values}


def flattened(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings as (dotted key, value); lists are not flattened."""
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        yield from flattened(value, f"{prefix}.{key}" if prefix else str(key))


def checkpoints(report: Report) -> Table | None:
    """Build the table of the measured checkpoints: class, dtype, path and hash."""
    lines = []
    for row in report["rows"]:
        hashed = (f"sha256 {row['sha256']}",) if row.get("sha256") else ()
        lines.append((row, [row.get("class"), row.get("dtype"), Cell(row.get("path"), hashed)]))
    return of_rows(report, ["class", "dtype", "checkpoint"], lines, "Checkpoints")


def times(report: Report) -> Table | None:
    """Build the table of the time that each task took for each row."""
    tasks = list(dict.fromkeys(task for row in report["rows"] for task in row.get("seconds") or {}))
    lines = [(row, [dig(row, "seconds", task) for task in tasks]) for row in report["rows"]]
    return of_rows(report, [Column(task, "", duration) for task in tasks], lines if tasks else [], "Time of measuring")


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or NONE
    return NONE if value is None else str(value)
