"""The page's parts that are not measurements: what the models wrote, how they were made, what decided the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from surgery.common.human import duration, size
from surgery.eval.report.markup import Markup, joined, tag
from surgery.eval.report.page_tables import row_marks, table
from surgery.eval.report.tables import NONE, Report, dig


def completions(report: Report) -> Markup | None:
    """Each prompt, and below it what every row wrote, beside each other."""
    written: dict[str, list[Markup]] = {}
    for row, mark in zip(report["rows"], row_marks(report), strict=True):
        for one in dig(row, "results", "generate", "completions") or []:
            card = tag("div", mark, tag("strong", row["name"]), tag("pre", one["text"]))
            written.setdefault(one["prompt"], []).append(card)
    if not written:
        return None
    parts = []
    for prompt, cards in written.items():
        parts += [tag("pre", prompt, class_="prompt"), tag("div", *cards, class_="completions")]
    return joined(tag("p", "Greedy, without selection.", class_="note"), *parts)


def conversions(report: Report) -> Markup | None:
    """How each converted checkpoint was made: method, command, time, peak memory, healing run."""
    lines = []
    for row in report["rows"]:
        made = row.get("conversion")
        if not made:
            continue
        seconds, peak = made.get("seconds"), made.get("peak_memory_bytes")
        cells = [
            " ".join(str(made[key]) for key in ("to", "method") if made.get(key)) or NONE,
            (seconds, NONE if seconds is None else duration(seconds)),
            (peak, NONE if peak is None else size(peak)),
            healing_run(made) or (NONE if not made.get("healing") else "yes"),
            tag("code", made.get("command") or NONE),
        ]
        lines.append((row, cells))
    return table(report, ["conversion", "time", "peak memory", "healing run", "command"], lines) if lines else None


def healing_run(conversion: dict) -> str | None:
    """``entity/project/run_id`` of the wandb run that healed a checkpoint; None if there is none."""
    run = dig(conversion, "healing", "wandb") or {}
    if not run.get("run_id"):
        return None
    return "/".join(str(run[key]) for key in ("entity", "project", "run_id") if run.get(key))


def settings(report: Report) -> Markup:
    """Command, settings, tasks with their data hashes, environment, checkpoints with their hashes, times."""
    blocks = {
        "Settings": report.get("settings"),
        "Environment": report.get("environment"),
        "Tokenizer": report.get("tokenizer"),
        **{f"Task {name}": values for name, values in (report.get("tasks") or {}).items()},
        **{f"Merged from {part.get('report')}": part for part in report.get("merged_from") or []},
    }
    return joined(
        tag("pre", report["command"], class_="prompt") if report.get("command") else None,
        tag("div", *(_facts(title, values) for title, values in blocks.items() if values), class_="facts"),
        _checkpoints(report),
        _times(report),
    )


def flattened(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (dotted key, plain value); lists stay whole."""
    if not isinstance(values, dict):
        yield prefix, values
        return
    for key, value in values.items():
        yield from flattened(value, f"{prefix}.{key}" if prefix else str(key))


def _facts(title: str, values: Any) -> Markup:
    pairs = [(tag("dt", key), tag("dd", _told(value))) for key, value in flattened(values)]
    return tag("div", tag("h3", title), tag("dl", *(part for pair in pairs for part in pair)))


def _told(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or NONE
    return NONE if value is None else str(value)


def _checkpoints(report: Report) -> Markup:
    lines = [
        (
            row,
            [
                row.get("class"),
                row.get("dtype"),
                joined(row.get("path") or NONE, tag("small", f"sha256 {row['sha256']}") if row.get("sha256") else None),
            ],
        )
        for row in report["rows"]
    ]
    return table(report, ["class", "dtype", "checkpoint"], lines, "Checkpoints")


def _times(report: Report) -> Markup | None:
    tasks = list(dict.fromkeys(task for row in report["rows"] for task in row.get("seconds") or {}))
    if not tasks:
        return None
    lines = []
    for row in report["rows"]:
        taken = [dig(row, "seconds", task) for task in tasks]
        lines.append((row, [(value, NONE if value is None else duration(value)) for value in taken]))
    return table(report, tasks, lines, "Time of measuring")
