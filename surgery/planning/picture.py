"""Plot of a plan: loss increase of each candidate against its KV bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from surgery.checkpoint.disk import written_whole
from surgery.common.pictures import check_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from surgery.planning.plan import Plan

TICKS = (1, 2, 3, 5, 10, 20, 30, 50, 100)
LEAST = 1e-4
"""Lower bound of plotted loss increases in nats per token; smaller ones are noise."""


def draw(plan: Plan) -> Figure:
    """Draw loss increase against KV bytes, with a line for each structure; both axes are logarithmic."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, ScalarFormatter

    from surgery.eval.report.style import DASHES, INK, PALETTE, STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.subplots()
        kinds = list(dict.fromkeys(_kind(row) for row in plan.rows))
        for number, kind in enumerate(kinds):
            points = [(100 * row.kv_ratio, max(row.loss_increase, LEAST)) for row in plan.rows if _kind(row) == kind]
            round_of_colors, color = divmod(number, len(PALETTE))
            look = {"color": PALETTE[color], "marker": "os"[round_of_colors % 2], "linestyle": DASHES[round_of_colors]}
            axes.plot(*zip(*points, strict=True), label=kind, **look)
        choice = plan.chosen
        point = 100 * choice.kv_ratio, max(choice.loss_increase, LEAST)
        axes.plot(*point, marker="o", markersize=13, fillstyle="none", color=INK, linestyle="none", label="the choice")
        if plan.budget["kv_ratio"] is not None:
            axes.axvline(100 * plan.budget["kv_ratio"], color=INK, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="KV bytes, % of the source's, log scale")
        axes.set_xticks([tick for tick in TICKS if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]])
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title("increase of the loss, nats per token, log scale")
        figure.legend(loc="outside right upper")
    return figure


def save(plan: Plan, path: Path) -> None:
    """Save the plot as png, svg or pdf, by the suffix.

    Raises SurgeryError: the file cannot be written, or has another suffix.
    """
    kind = check_picture(path)
    with written_whole(path) as part:
        draw(plan).savefig(part, format=kind)


def _kind(row) -> str:
    if row.engine:
        return f"{row.engine}'s own"
    bits = row.asked.get("bits")
    return row.to if bits is None else f"{row.to}, bits {bits}"
