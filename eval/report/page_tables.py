"""Measurement tables of the page. Each function takes the report and returns None if there is nothing to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surgery.common.human import decimal, perplexity_text, share, with_perplexity
from surgery.common.tables.table import Cell, Column, Table
from surgery.eval.report.style import looks
from surgery.eval.report.tables import Report, ReportRow, described, dig, interval, lm_eval_tasks, signed_points
from surgery.eval.report.tables import headline as plain_headline

MOST_SOURCES_ACROSS = 6


def headline(report: Report) -> Table:
    """Build the headline table, with a description below each row's name."""

    def name(row: ReportRow) -> Cell:
        return replace(name_cell(report, row), below=(described(row),))

    return plain_headline(report, name=name)


def name_cell(report: Report, row: ReportRow) -> Cell:
    """Build the cell of a row's name, with the row's role and its color in the plots."""
    look = next(look for each, look in zip(report["rows"], looks(report), strict=True) if each is row)
    return Cell(row["name"], tone=str(row.get("role") or ""), mark=look.color)


def of_rows(
    report: Report,
    columns: Sequence[Column | str],
    lines: Sequence[tuple[ReportRow, Sequence[Any]]],
    caption: str,
    *notes: str,
) -> Table | None:
    """Build a table whose first column is the row's name; None without lines."""
    rows = [(name_cell(report, row), *values) for row, values in lines]
    return Table.of(["row", *columns], rows, caption, notes) if rows else None


def number(title: str, digits: int, about: str = "") -> Column:
    """Build a column of numbers with `digits` decimals."""
    return Column(title, about, lambda value: f"{value:,.{digits}f}")


def by_source(report: Report) -> Table | None:
    """Build the table of loss, perplexity and bits per byte, with one column per text source if there are few."""
    across = _sources(report)
    across = across if len(across) <= MOST_SOURCES_ACROSS else []
    lines = []
    for row in report["rows"]:
        if whole := dig(row, "results", "loss"):
            parts = [dig(whole, "by_source", source, "loss") for source in across]
            lines.append((row, [*parts, whole.get("loss"), whole.get("perplexity"), whole.get("bits_per_byte")]))
    columns = [
        *(Column(source, f"Loss of {source}, nats per token (perplexity)", with_perplexity) for source in across),
        number("all", 4, "Mean cross-entropy, nats per token"),
        Column("perplexity", "exp of the mean loss", perplexity_text),
        number("bits/byte", 4, "Loss of the text in bits for each of its bytes: comparable between tokenizers"),
    ]
    return of_rows(report, columns, lines, "Loss by source, nats per token" if across else "Loss, nats per token")


def by_many_sources(report: Report) -> Table | None:
    """Build the table of loss with one line per text source, if there are too many for columns."""
    sources, rows = _sources(report), [row for row in report["rows"] if dig(row, "results", "loss")]
    if len(sources) <= MOST_SOURCES_ACROSS:
        return None
    columns = [Column("source"), *(Column(str(row["name"]), "", with_perplexity) for row in rows)]
    lines = [
        [source, *(dig(row, "results", "loss", "by_source", source, "loss") for row in rows)] for source in sources
    ]
    return Table(columns, lines, "Loss by source, nats per token (perplexity)")


def recall(report: Report) -> Table | None:
    """Build the table of recall, its change and the number of prompts."""
    lines = []
    for row in report["rows"]:
        if result := dig(row, "results", "recall"):
            change = dig(row, "comparison", "recall") or {}
            change_cell = Cell(change.get("difference"), interval(change, signed_points))
            lines.append((row, [result.get("accuracy"), change_cell, result.get("prompts"), result.get("length")]))
    columns = [
        Column("keys returned", "Share of planted keys returned with all digits right", share),
        Column("change in points", "Difference to the baseline in percentage points, 95% interval", signed_points),
        number("prompts", 0),
        number("tokens per prompt", 0),
    ]
    return of_rows(report, columns, lines, "Recall of planted keys")


def lm_eval(report: Report) -> Table | None:
    """Build the table of all metrics of all lm-eval tasks, with standard errors."""
    lines = []
    for row in report["rows"]:
        for task in lm_eval_tasks(row):
            result = row["results"][task]
            samples, rest = result.get("n_samples"), (result.get("n_shot"), result.get("lm_eval"))
            for metric, measured in (result.get("metrics") or {}).items():
                error = measured.get("stderr")
                has_error = isinstance(error, int | float) and samples != 1
                value = Cell(measured.get("value"), (f"± {error:.4f}",) if has_error else ())
                lines.append((row, [task.removeprefix("lm-eval:"), metric, value, samples, *rest]))
    value = Column("value", "± standard error", lambda v: decimal(v, 4) if isinstance(v, int | float) else str(v))
    columns = ["task", "metric", value, "samples", Column("shots", "Worked examples in the prompt"), "lm_eval"]
    return of_rows(report, columns, lines, "Tasks of lm-evaluation-harness")


def speed(report: Report) -> Table | None:
    """Build the table of tokens per second by context and batch size."""
    lines, measured = [], {}
    for row in report["rows"]:
        result = dig(row, "results", "speed") or {}
        for point in result.get("points") or []:
            measured = measured or result
            rates = [point.get(f"{phase}_tokens_per_second") for phase in ("prefill", "decode")]
            lines.append((row, [point["context"], point["batch"], *rates, point.get("note") or ""]))
    columns = [number("context", 0), "batch", number("prefill tok/s", 0), number("decode tok/s", 1), ""]
    about = f"{measured.get('dtype')} on {measured.get('device')}; medians of {measured.get('repeats')} repeats."
    return of_rows(report, columns, lines, "Speed by context and batch", about)


def _sources(report: Report) -> list[str]:
    return list(dict.fromkeys(s for row in report["rows"] for s in dig(row, "results", "loss", "by_source") or {}))
