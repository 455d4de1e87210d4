"""The plan as a picture: what each candidate loses by the bytes that it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from surgery.planning.plan import Plan

LEAST = 1e-4
"""Nats per token below which a loss is drawn as this: noise, or none."""


def draw(plan: Plan) -> Figure:
    """Loss against KV bytes, a line for each structure; both axes in logarithms."""
    import matplotlib
    from matplotlib.figure import Figure

    from surgery.eval.report.style import INK, PALETTE, STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes = figure.subplots()
        kinds = list(dict.fromkeys(_kind(row) for row in plan.rows))
        for number, kind in enumerate(kinds):
            points = [(100 * row.kv_ratio, max(row.loss_increase, LEAST)) for row in plan.rows if _kind(row) == kind]
            axes.plot(*zip(*points, strict=True), marker="o", color=PALETTE[number % len(PALETTE)], label=kind)
        chosen = plan.chosen
        place = 100 * chosen.kv_ratio, max(chosen.loss_increase, LEAST)
        axes.plot(*place, marker="o", markersize=13, fillstyle="none", color=INK, linestyle="none", label="the choice")
        if plan.budget["kv_ratio"] is not None:
            axes.axvline(100 * plan.budget["kv_ratio"], color=INK, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="KV bytes, % of the source's")
        axes.set_title("increase of the loss, nats per token, before a fit")
        axes.legend()
    return figure


def save(plan: Plan, path: Path) -> None:
    """Draws it into a file (png, svg, pdf).

    Raises:
        SurgeryError: it cannot be written.
    """
    try:
        draw(plan).savefig(path)
    except (OSError, ValueError) as error:
        raise SurgeryError(f"{path}: the plot cannot be written ({error})") from None


def _kind(row) -> str:
    bits = row.asked.get("bits")
    return row.to if bits is None or row.to == "quantized" else f"{row.to}, bits {bits}"
