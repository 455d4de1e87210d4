"""Registry of report plots, and their export as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib.figure import Figure

from surgery.eval.report import heat_maps, pareto, plots
from surgery.eval.report.style import save
from surgery.eval.report.tables import Report


class Plot(NamedTuple):
    """Title of a plot and its drawing function, which returns None if there is nothing to draw."""

    title: str
    draw: Callable[[Report], Figure | None]


PLOTS = {
    "pareto-loss": Plot("Loss against KV bytes", pareto.loss),
    "pareto-recall": Plot("Recall against KV bytes", pareto.recall),
    "loss-by-position": Plot("Loss by position in the sequence", plots.loss_by_position),
    "needle": Plot("Needles found, by length and depth", heat_maps.needle),
    "speed": Plot("Tokens per second against context", plots.speed),
    "layer-errors": Plot("Errors of converted checkpoints, by layer", plots.layer_errors),
}


def save_plots(report: Report, folder: Path, kind: Literal["svg", "png"] = "svg") -> dict[str, Path]:
    """Write the non-empty plots as ``KEY.svg`` or ``KEY.png``; return the paths by key of `PLOTS`.

    Raises SurgeryError: a file cannot be written.
    """
    drawn = {key: plot.draw(report) for key, plot in PLOTS.items()}
    return {key: save(figure, folder / f"{key}.{kind}") for key, figure in drawn.items() if figure is not None}
