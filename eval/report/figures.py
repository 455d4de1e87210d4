"""Registry of report plots, and their export as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from surgery.common.file_names import file_name
from surgery.eval.report import heat_maps, pareto, plots
from surgery.eval.report.style import save_png
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
    "speed": Plot("Decoded tokens per second against context", plots.speed),
    "layer-errors": Plot("Errors of converted checkpoints, by layer", plots.layer_errors),
}


def save_pngs(report: Report, folder: Path, keys: Iterable[str] = tuple(PLOTS)) -> dict[str, Path]:
    """Write the non-empty plots among `keys` as ``KEY.png``; return the paths by key of `PLOTS`.

    Raises SurgeryError: a file cannot be written.
    """
    drawn = {key: PLOTS[key].draw(report) for key in keys}
    return {key: save_png(figure, folder / f"{key}.png") for key, figure in drawn.items() if figure is not None}


def save_needle_png(report: Report, folder: Path) -> dict[str, Path]:
    """Write the needle heat map of each row that has one as ``needle-NAME.png``; return the paths by row name.

    Characters that are invalid in file names become dashes; if two names then collide, the row's index is appended.
    Raises SurgeryError: a file cannot be written.
    """
    paths: dict[str, Path] = {}
    for number, row in enumerate(report["rows"]):
        figure = heat_maps.needle({**report, "rows": [row]})
        if figure is None:
            continue
        first, second = needle_names(row["name"], number)
        path = folder / (second if folder / first in paths.values() else first)
        paths[row["name"]] = save_png(figure, path)
    return paths


def needle_names(row: object, number: int) -> tuple[str, str]:
    """Return the file name of a row's needle heat map, and the name to use if the first one is taken."""
    name = file_name(row, "row")
    return f"needle-{name}.png", f"needle-{name}-{number}.png"
