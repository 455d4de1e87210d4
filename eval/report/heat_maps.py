"""Heat map of a report: needle scores by depth and length."""

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
