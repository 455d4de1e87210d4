"""Verdict of a report in sentences: the best checkpoints and the cheap baselines closest in KV bytes."""

from __future__ import annotations

from collections.abc import Sequence

from surgery.common.human import cost, perplexity, perplexity_text, share
from surgery.eval.report.document import (
    Report,
    ReportRow,
    baseline_of,
    compared_context,
    compared_share,
    dig,
)


def verdict(report: Report) -> list[str]:
    """Describe bytes and loss of the checkpoint with the lowest loss, and of smaller checkpoints on the Pareto front.

    Empty if no checkpoint was compared with a baseline.
    """
    compared = compared_rows(report)
    if not compared:
        return []
    best, *smaller = frontier(compared, report)
    lead = f"Loses least of {len(compared)} checkpoints: " if len(compared) > 1 else ""
    sentences = [f"{lead}{_sentence(best, report)}"]
    if smaller:
        sentences.append(
            f"Smaller, and beaten by no checkpoint: {'; '.join(_short_clause(row, report) for row in smaller)}."
        )
    return sentences


def by_checkpoint(report: Report) -> list[str]:
    """Describe every checkpoint that was compared with a baseline, with the cheap baselines closest in bytes."""
    return [
        f"{row['name']}: {_bytes(row, report)} for {cost(_delta(row))}{_rivals(row, report)}"
        for row in compared_rows(report)
    ]


def compared_rows(report: Report, role: str = "checkpoint") -> list[ReportRow]:
    """Return the rows of a role whose live bytes and loss were compared with a baseline's."""
    return [
        row
        for row in report["rows"]
        if row.get("role") == role
        and dig(row, "comparison", "loss", "difference") is not None
        and dig(row, "kv", "ratio") is not None
    ]


def frontier(rows: Sequence[ReportRow], report: Report) -> list[ReportRow]:
    """Return the Pareto front of rows in bytes and loss, lowest loss first."""
    return [rows[index] for index in pareto_front([(_delta(row), compared_share(row, report)) for row in rows])]


def pareto_front(points: Sequence[tuple[float, float]], better: str = "low") -> list[int]:
    """Return the indices of the Pareto front of points (x, y), by increasing x.

    A point is dominated by one that is no worse in both coordinates and better in one. Low x is better; low or high y
    is better as `better` says ("low" or "high"). Of equal points the first is kept.
    """
    sign = 1 if better == "low" else -1
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], sign * points[i][1])):
        if not front or sign * points[index][1] < sign * points[front[-1]][1]:
            front.append(index)
    return front


def _sentence(row: ReportRow, report: Report) -> str:
    baseline = baseline_of(report) or {}
    change = perplexity(_delta(row)) - 1
    losses = [dig(each, "results", "loss", "loss") for each in (baseline, row)]
    recalls = [dig(each, "results", "recall", "accuracy") for each in (baseline, row)]
    parts = [
        f"{row['name']}, {_bytes(row, report)}",
        f"perplexity {change:+.1%}" + ("" if None in losses else f" ({_arrow(losses)})"),
        "" if None in recalls else f"recall {share(recalls[0])} → {share(recalls[1])}{_prompts(row)}",
    ]
    rivals = _rivals(row, report).replace("; ", "; rivals next to it in bytes: ", 1)
    return ", ".join(filter(None, parts)) + rivals + "."


def _bytes(row: ReportRow, report: Report) -> str:
    text = f"{share(compared_share(row, report))} of the KV bytes"
    if (context := compared_context(report)) is not None:
        return f"{text} at {context:,} tokens"
    num_bytes = dig(row, "kv", "bytes_per_token")
    return text if num_bytes is None else f"{text} ({num_bytes:,.0f} a token)"


def _short_clause(row: ReportRow, report: Report) -> str:
    recall = dig(row, "results", "recall", "accuracy")
    recall_part = "" if recall is None else f", recall {share(recall)}{_prompts(row)}"
    change = perplexity(_delta(row)) - 1
    return f"{row['name']}, {share(compared_share(row, report))}: perplexity {change:+.1%}{recall_part}"


def _prompts(row: ReportRow) -> str:
    count = dig(row, "results", "recall", "prompts")
    return "" if count is None else f" (n = {count})"


def _arrow(losses: Sequence[float]) -> str:
    return " → ".join(perplexity_text(perplexity(loss)) for loss in losses)


def _rivals(row: ReportRow, report: Report) -> str:
    """Describe the closest cheap baselines in bytes on their Pareto front: one no larger than a row, and one larger."""

    def bytes_of(each: ReportRow) -> float:
        return compared_share(each, report)

    rivals = frontier(compared_rows(report, "variant"), report)
    below = max((each for each in rivals if bytes_of(each) <= bytes_of(row)), key=bytes_of, default=None)
    above = min((each for each in rivals if bytes_of(each) > bytes_of(row)), key=bytes_of, default=None)
    return "".join(
        f"; {where}, {each['name']}, {share(bytes_of(each))}: {_delta(each):+.4f} "
        f"(perplexity {perplexity(_delta(each)) - 1:+.1%})"
        for where, each in (("no larger", below), ("larger", above))
        if each
    )


def _delta(row: ReportRow) -> float:
    return row["comparison"]["loss"]["difference"]
