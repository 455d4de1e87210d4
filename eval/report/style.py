"""Common style of report plots: one color per row, and identical output bytes for identical reports."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgery.common.errors import SurgeryError
from surgery.eval.report.tables import Report
from surgery.eval.report.verdict import compared_rows, frontier

INK, MUTED, GRID, PAPER = "#1b1f24", "#5d6670", "#dfe3e8", "#fefefd"
"""Colors of text, axes, grid and background."""

# Okabe and Ito's color-blind safe palette (https://jfly.uni-koeln.de/color/) without black and yellow, and five more
# distinguishable colors with a contrast of 2.5 to the light and the dark background.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
PALETTE += ("#7a5bd0", "#8a5a34", "#8a8a12", "#a3265f", "#14a0a8")
BASELINE_COLOR = "#767d86"
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
MARKERS = {"baseline": "D", "variant": "s", "checkpoint": "o"}
LABEL_LENGTH = 40
SCALES = {"log": "log scale", "symlog": "log scale away from 0"}

STYLE = {
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": "none",
    "font.family": ["DejaVu Sans"],  # ships with matplotlib, so the output is the same on every machine
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # row names may contain dollar signs
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "surgery",
    "svg.id": None,
}


class Look(NamedTuple):
    """Style of one row in every plot; `beaten` rows, which another row beats at both bytes and loss, can be hidden."""

    color: str
    dashes: str | tuple
    marker: str
    beaten: bool = False


def styled(draw: Callable[[Report], Figure | None]) -> Callable[[Report], Figure | None]:
    """Decorate a drawing function to use the common style instead of the process's matplotlib settings."""

    @wraps(draw)
    def inner(report: Report) -> Figure | None:
        with matplotlib.rc_context(_supported_style()):
            figure = draw(report)
        _name_scales(figure.axes if figure is not None else [])
        return figure

    return inner


def _name_scales(panels: Sequence[Axes]) -> None:
    """Add the scale of every non-linear axis to its label; unlabeled panels only if they differ from the first."""
    for ax in panels:
        for axis, first in ((ax.xaxis, panels[0].xaxis), (ax.yaxis, panels[0].yaxis)):
            name, text = SCALES.get(axis.get_scale()), axis.get_label_text()
            if name and (text or axis.get_scale() != first.get_scale()):
                axis.set_label_text(f"{text}, {name}" if text else name)


def looks(report: Report) -> list[Look]:
    """Assign a look to each row; the baseline is gray.

    Unbeaten rows get their colors first, so that the rows shown by default differ in color. After eleven rows, colors
    repeat with other dashes.
    """
    compared = [row for role in ("checkpoint", "variant") for row in compared_rows(report, role)]
    beaten = set(map(id, compared)) - set(map(id, frontier(compared, report)))
    drawn = sorted((row for row in report["rows"] if row.get("role") != "baseline"), key=lambda row: id(row) in beaten)
    styles = cycle((color, dashes) for dashes in DASHES for color in PALETTE)
    style = dict(zip(map(id, drawn), styles, strict=False))
    return [
        Look(BASELINE_COLOR, "-", MARKERS["baseline"])
        if row.get("role") == "baseline"
        else Look(*style[id(row)], MARKERS.get(row.get("role"), "o"), id(row) in beaten)
        for row in report["rows"]
    ]


def label(text: object) -> str:
    """Convert a name to a plot label: one line of at most 40 printable characters."""
    printable = "".join(" " if unicodedata.category(c).startswith(("C", "Z")) else c for c in str(text)).strip()
    printable = printable if len(printable) <= LABEL_LENGTH else printable[: LABEL_LENGTH - 1] + "…"
    return printable.replace("$", r"\$")  # matplotlib parses text between dollar signs as math


def to_svg(figure: Figure) -> str:
    """Render a figure as SVG; equal figures give equal text."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_supported_style()):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG, or as PNG without date or version metadata.

    Raises SurgeryError: the file cannot be written.
    """
    try:
        if path.suffix == ".svg":
            path.write_text(to_svg(figure), encoding="utf-8")
            return path
        with matplotlib.rc_context(_supported_style()):
            figure.savefig(path, format="png", dpi=144, metadata={"Software": None})
    except OSError as error:
        raise SurgeryError(f"cannot write {path}: {error.strerror}") from None
    return path


def _supported_style() -> dict:
    """Return the style without settings that the installed matplotlib lacks."""
    return {key: value for key, value in STYLE.items() if key in matplotlib.rcParams}
