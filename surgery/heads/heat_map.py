"""Patterns as pictures: layers down, KV heads across, the heads that would stay full outlined."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from surgery.heads.pattern import HeadPattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 4
"""Patterns in a line."""


def head_maps(patterns: Mapping[str, HeadPattern], share: float | None = None) -> Figure:
    """A panel a pattern, coloured by score from the pattern's least to its greatest, which stand above it.

    Scores of different methods have different scales, so each panel has its own.

    Args:
        patterns: by name, of any shapes.
        share: outline this share of the heads, the best.
    """
    from matplotlib.figure import Figure

    from surgery.eval.report.plots import WIDTH
    from surgery.eval.report.style import MUTED, styled

    @styled
    def draw(_: None) -> Figure:
        across = min(len(patterns), ACROSS)
        down = -(-len(patterns) // across)
        deepest = max(pattern.layers for pattern in patterns.values())
        height = min(max(0.16 * deepest, 1.6), 8.0) + 0.7
        figure = Figure(figsize=(WIDTH * max(across, 2) / ACROSS, height * down + 0.5), layout="constrained")
        axes, mesh = [], None
        for index, (name, pattern) in enumerate(patterns.items()):
            axes.append(figure.add_subplot(down, across, index + 1))
            mesh = _panel(axes[-1], name, pattern, share)
            axes[-1].set_ylabel("layer" if index % across == 0 else "")
            axes[-1].set_xlabel("KV head" if index + across >= len(patterns) else "")
        bar = figure.colorbar(mesh, ax=axes, location="bottom", aspect=40, shrink=0.6, ticks=[0, 0.5, 1])
        bar.ax.set_xticklabels(["lowest score", "halfway", "highest score"])
        bar.outline.set_visible(False)
        if share is not None:
            bar.set_label(f"outlined: the {100 * share:g}% of heads with the highest scores", color=MUTED)
        return figure

    return draw(None)


def save_head_maps(path: str | Path, patterns: Mapping[str, HeadPattern], share: float | None = None) -> Path:
    """Writes `head_maps` as PNG.

    Raises:
        SurgeryError: the file cannot be written.
    """
    from surgery.eval.report.style import save_png

    return save_png(head_maps(patterns, share), Path(path))


def _panel(ax: Axes, name: str, pattern: HeadPattern, share: float | None):
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    from surgery.eval.report.heat_maps import COLOURS, LIMIT_COLOUR
    from surgery.eval.report.style import INK, MUTED, PAPER, label

    scores = pattern.scores.cpu()
    least, greatest = scores.min().item(), scores.max().item()
    values = (scores - least) / (greatest - least or 1.0)
    style = {
        "cmap": COLOURS,
        "vmin": 0,
        "vmax": 1,
        "edgecolor": PAPER,
        "linewidth": 0.8 if pattern.layers <= 16 else 0.3,
    }
    edges = [torch.arange(size + 1) - 0.5 for size in (pattern.kv_heads, pattern.layers)]
    mesh = ax.pcolormesh(*(edge.numpy() for edge in edges), values.numpy(), **style)
    for layer, head in pattern.full_heads(share).nonzero().tolist() if share is not None else []:
        inset = {"fill": False, "edgecolor": LIMIT_COLOUR, "linewidth": 1.4}
        ax.add_patch(Rectangle((head - 0.44, layer - 0.44), 0.88, 0.88, **inset))
    ax.set_title(label(name))
    ax.set_title(f"{least:.3g} to {greatest:.3g}", loc="right", fontsize=8, fontweight="normal", color=MUTED)
    ax.set_ylim(pattern.layers - 0.5, -0.5)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    ax.grid(False)
    ax.tick_params(length=0, labelcolor=INK)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return mesh
