"""Verdict of a report in sentences: the best checkpoints and the cheap baselines closest in KV bytes."""

from __future__ import annotations

from collections.abc import Sequence

from surgery.common.human import cost, perplexity, share
from surgery.eval.report.document import (
    Report,
    ReportRow,
    baseline_of,
    compared_context,
    compared_share,
    dig,
)


def verdict(report: Report) -> list[str]:
    """Describe the checkpoints on the Pareto front, lowest loss first, with the cheap baselines closest in KV bytes.

    A last line names the other checkpoints. Empty if no checkpoint was compared with a baseline.
    """
    compared = compared_rows(report)
    front = frontier(compared, report)
    lines = [f"{row['name']}: {_cost(row, report)}{_rivals(row, report)}" for row in front]
    beaten = [str(row["name"]) for row in compared if not any(row is each for each in front)]
    return [*lines, *([f"Beaten at bytes and loss: {', '.join(beaten)}."] if beaten else [])]


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


def _cost(row: ReportRow, report: Report) -> str:
    recalls = [dig(each, "results", "recall", "accuracy") for each in (baseline_of(report), row)]
    context = compared_context(report)
    where = "" if context is None else f" at {context:,} tokens"
    return f"{share(compared_share(row, report))} of the KV bytes{where} for {cost(_delta(row), tuple(recalls))}"


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
