"""Heat map of a pattern: layers down, KV heads across, the heads with the highest scores outlined."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from surgery.heads.pattern import HeadPattern

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUTLINED = 0.25
"""Share of heads to outline, highest scores first."""


def head_map(pattern: HeadPattern) -> Figure:
    """Draw a pattern, colored by score; the title has the range of scores."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    from surgery.eval.report.heat_maps import COLORS, LIMIT_COLOR
    from surgery.eval.report.plots import WIDTH
    from surgery.eval.report.style import INK, MUTED, PAPER, label, styled

    @styled
    def draw(_: None) -> Figure:
        height = min(max(0.16 * pattern.layers, 1.6), 8.0) + 1.2
        figure = Figure(figsize=(WIDTH / 2, height), layout="constrained")
        ax, scores = figure.add_subplot(), pattern.scores.cpu()
        least, greatest = scores.min().item(), scores.max().item()
        values = (scores - least) / (greatest - least or 1.0)
        edges = [(torch.arange(size + 1) - 0.5).numpy() for size in (pattern.kv_heads, pattern.layers)]
        style = {"cmap": COLORS, "vmin": 0, "vmax": 1, "edgecolor": PAPER}
        mesh = ax.pcolormesh(*edges, values.numpy(), **style, linewidth=0.8 if pattern.layers <= 16 else 0.3)
        for layer, head in pattern.full_heads(OUTLINED).nonzero().tolist():
            inset = {"fill": False, "edgecolor": LIMIT_COLOR, "linewidth": 1.4}
            ax.add_patch(Rectangle((head - 0.44, layer - 0.44), 0.88, 0.88, **inset))
        ax.set(title=label(pattern.method), xlabel="KV head", ylabel="layer", ylim=(pattern.layers - 0.5, -0.5))
        ax.set_title(f"{least:.3g} to {greatest:.3g}", loc="right", fontsize=8, fontweight="normal", color=MUTED)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=9))
        ax.grid(False)
        ax.tick_params(length=0, labelcolor=INK)
        ax.spines[:].set_visible(False)
        bar = figure.colorbar(mesh, ax=ax, location="bottom", aspect=40, shrink=0.6, ticks=[0, 0.5, 1])
        bar.ax.set_xticklabels(["lowest score", "halfway", "highest score"])
        bar.outline.set_visible(False)
        bar.set_label(f"outlined: the {100 * OUTLINED:g}% of heads with the highest scores", color=MUTED)
        return figure

    return draw(None)


def save_head_map(path: Path, pattern: HeadPattern) -> Path:
    """Write `head_map` as PNG. Raises SurgeryError: the file cannot be written."""
    from surgery.eval.report.style import save

    return save(head_map(pattern), path)
