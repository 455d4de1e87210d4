"""Heat maps of a report: needle scores by depth and length, RULER-style scores by row and task."""

from __future__ import annotations

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgery.eval.report.plots import WIDTH
from surgery.eval.report.style import INK, PAPER, label, styled
from surgery.eval.report.tables import Report, ReportRow, dig

COLORS = colormaps["cividis"]  # safe for color vision deficiency and in grayscale
LIMIT_COLOR = "#d55e00"
CELL_DARK, CELL_LIGHT = "#101010", "#ffffff"  # text on cells


@styled
def needle(report: Report) -> Figure | None:
    """Plot needles found by length (x) and depth (y), one panel per row; an orange line marks the model's limit."""
    rows = [row for row in report["rows"] if dig(row, "results", "needle", "grid")]
    if not rows:
        return None
    across = min(len(rows), 4)
    down = -(-len(rows) // across)
    figure = Figure(figsize=(WIDTH * max(across, 2) / 4, 2.5 * down + 0.2), layout="constrained")
    for index, row in enumerate(rows):
        ax = figure.add_subplot(down, across, index + 1)
        _needle_panel(ax, row)
        ax.set_ylabel("depth, %" if index % across == 0 else "")
        ax.set_xlabel("length, tokens" if index + across >= len(rows) else "")
    return figure


@styled
def ruler(report: Report) -> Figure | None:
    """Plot scores by row and RULER-style task, one panel per length."""
    rows = [row for row in report["rows"] if dig(row, "results", "ruler", "lengths")]
    if not rows:
        return None
    scores = {row["name"]: row["results"]["ruler"]["lengths"] for row in rows}
    lengths = sorted({length for entry in scores.values() for length in entry}, key=int)
    tasks = list(
        dict.fromkeys(task for entry in scores.values() for part in entry.values() for task in part.get("tasks") or {})
    )
    panel = 0.27 * len(rows) + 0.45
    figure = Figure(figsize=(WIDTH, panel * len(lengths) + 0.9), layout="constrained")
    for index, length in enumerate(lengths):
        ax = figure.add_subplot(len(lengths), 1, index + 1)
        cells = [
            [dig(row, "results", "ruler", "lengths", length, "tasks", task, "score") for task in tasks]
            + [dig(row, "results", "ruler", "lengths", length, "average")]
            for row in rows
        ]
        _draw_cells(ax, cells, [label(row["name"]) for row in rows])
        ax.set_title(f"{int(length):,} tokens: score, %")
        ax.axvline(len(tasks), color=PAPER, linewidth=3)
        last = index == len(lengths) - 1
        ax.set_xticks([x + 0.5 for x in range(len(tasks) + 1)], [*map(label, tasks), "average"] if last else [])
        if last:
            ax.tick_params("x", rotation=30 if len(tasks) > 7 else 0)
            for text in ax.get_xticklabels() if len(tasks) > 7 else []:
                text.set(ha="right", rotation_mode="anchor")
    return figure


def _needle_panel(ax: Axes, row: ReportRow) -> None:
    result = row["results"]["needle"]
    lengths, limit = result["lengths"], result.get("limit")
    by_depth = [list(line) for line in zip(*result["grid"], strict=True)]
    _draw_cells(ax, by_depth, [f"{depth:g}" for depth in result["depths"]])
    ax.set_title(label(row["name"]), fontsize=9)
    ax.set_xticks([x + 0.5 for x in range(len(lengths))], [f"{length:,}" for length in lengths])
    within = sum(limit is None or length <= limit for length in lengths)
    if within < len(lengths):
        ax.axvline(within, color=LIMIT_COLOR, linewidth=2.5)
        ax.set_title(f"limit {limit:,}", loc="right", fontsize=8, fontweight="normal", color=LIMIT_COLOR)


def _draw_cells(ax: Axes, values: list[list[float | None]], names: list[str]) -> None:
    """Draw shares as colored cells with their percentage, first line on top; cells without a value stay empty."""
    numbers = [[float("nan") if value is None else value for value in line] for line in values]
    ax.pcolormesh(numbers, cmap=COLORS, vmin=0, vmax=1, edgecolor=PAPER, linewidth=0.8)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if value is None or value != value:
                continue
            dark = value < 0.55
            style = {"ha": "center", "va": "center", "fontsize": 8, "color": CELL_LIGHT if dark else CELL_DARK}
            ax.text(x + 0.5, y + 0.5, f"{100 * value:.0f}", **style)
    ax.set_yticks([y + 0.5 for y in range(len(names))], names)
    ax.set_ylim(len(names), 0)
    ax.set_xlim(0, len(values[0]))
    ax.grid(False)
    ax.tick_params(length=0, labelcolor=INK)
    for spine in ax.spines.values():
        spine.set_visible(False)
