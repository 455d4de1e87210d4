"""Line plots of a report. Each function returns a matplotlib `Figure`, or None if there is nothing to draw.

Figures are created without pyplot, so there is no global state and nothing to close.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from surgery.eval.report.axes import change_axis, context_axis, decades_axis
from surgery.eval.report.style import INK, Look, label, looks, styled
from surgery.eval.report.tables import Report, ReportRow, dig

WIDTH = 12.0
"""Figure width in inches."""

PHASES = {"decode_tokens_per_second": "Decoding", "prefill_tokens_per_second": "Prefill"}

BEATEN = 0.35
"""Opacity of the lines of rows that another row beats at both bytes and loss."""


@styled
def loss_by_position(report: Report) -> Figure | None:
    """Plot the loss by position, and next to it the change from the baseline, in nats per token."""
    drawn = [
        (row, look, {(b["start"] + b["end"]) / 2: b["loss"] for b in dig(row, "results", "loss", "by_position")})
        for row, look in zip(report["rows"], looks(report), strict=True)
        if dig(row, "results", "loss", "by_position")
    ]
    if not drawn:
        return None
    base = next((losses for row, _, losses in drawn if row["name"] == report.get("baseline")), None)
    compares = base is not None and len(drawn) > 1
    figure, axes = _panels(2 if compares else 1, height=3.6)
    for row, look, losses in drawn:
        _line(axes[0], list(losses), list(losses.values()), row, look)
        if compares:
            shared = [x for x in losses if x in base]
            _line(axes[1], shared, [losses[x] - base[x] for x in shared], row, look)
    axes[0].set_title("Loss by position")
    axes[0].set_ylabel("nats per token")
    if compares:
        axes[1].set_title(f"Change from {label(report['baseline'])}")
        change_axis(axes[1], _y_values(axes[1]))
    buckets = [bucket for row, *_ in drawn for bucket in row["results"]["loss"]["by_position"]]
    for ax in axes:
        if len({bucket["end"] - bucket["start"] for bucket in buckets}) > 2:  # growing buckets; the last may be cut
            context_axis(ax, [bucket["end"] for bucket in buckets])
        ax.set_xlabel("position in the sequence, tokens")
    return _with_legend(figure, axes)


@styled
def speed(report: Report) -> Figure | None:
    """Plot tokens per second against the context length, one panel per phase and batch size."""
    points = [
        (row, look, point)
        for row, look in zip(report["rows"], looks(report), strict=True)
        for point in dig(row, "results", "speed", "points") or []
        if positive(point.get("decode_tokens_per_second"))
    ]
    if not points:
        return None
    batches = sorted({point["batch"] for *_, point in points})
    panels = [
        (key, title, batch)
        for key, title in PHASES.items()
        for batch in batches
        if any(p["batch"] == batch and positive(p.get(key)) for *_, p in points)
    ]
    figure, axes = _panels(len(panels), height=3.8)
    for ax, (key, title, batch) in zip(axes, panels, strict=True):
        for row, look in zip(report["rows"], looks(report), strict=True):
            curve = sorted((p for r, _, p in points if r is row and p["batch"] == batch), key=lambda p: p["context"])
            _line(ax, [p["context"] for p in curve], [p.get(key) for p in curve], row, look)
        ax.set_title(f"{title}, batch {batch}")
        context_axis(ax, [p["context"] for *_, p in points])
        decades_axis(ax, _y_values(ax))
        ax.set_ylabel("tokens per second" if ax is axes[0] else "")
    return _with_legend(figure, axes)


@styled
def layer_errors(report: Report) -> Figure | None:
    """Plot the relative error of each converted layer, one panel per lossy stage, and ranks if they vary."""
    rows = [
        (row, look, layers)
        for row, look in zip(report["rows"], looks(report), strict=True)
        if (layers := dig(row, "conversion", "layers"))
    ]
    stages = list(dict.fromkeys(stage for *_, layers in rows for x in layers for stage in x.get("measured") or {}))
    panels: dict[str, Callable[[dict], float | None]] = {
        f"Error after {stage}": lambda layer, stage=stage: dig(layer, "measured", stage) for stage in stages
    }
    if any(layer.get("latent_error_share") for *_, layers in rows for layer in layers):
        panels["Energy outside the latent, predicted"] = lambda layer: layer.get("latent_error_share")
    if any(len({layer.get("rank") for layer in layers}) > 1 for *_, layers in rows):
        panels["Rank"] = lambda layer: layer.get("rank")
    if not panels:
        return None
    figure, axes = _panels(len(panels), height=3.4)
    for ax, (title, value) in zip(axes, panels.items(), strict=True):
        for row, look, layers in rows:
            _line(ax, *_columns([(_layer_x(x["layer"]), value(x)) for x in layers if positive(value(x))]), row, look)
        ax.set_title(title)
        ax.set_xlabel("layer")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
        if title != "Rank" and _y_values(ax):
            decades_axis(ax, _y_values(ax))
        if title.startswith("Error"):
            ax.set_ylabel("relative error" if ax is axes[0] else "")
    return _with_legend(figure, axes)


def _layer_x(layer: int | str) -> float:
    """Return the x coordinate of a layer; the midpoint for layers that share latents, such as "4-7"."""
    first, _, last = str(layer).partition("-")
    return (float(first) + float(last or first)) / 2


def _panels(number: int, height: float) -> tuple[Figure, list[Axes]]:
    """Create a figure with a grid of panels, at most three per line; four panels form a square."""
    across = 2 if number == 4 else min(number, 3)
    down = -(-number // across)
    figure = Figure(figsize=(WIDTH * (0.62 if number == 1 else 1), height * down), layout="constrained")
    return figure, [figure.add_subplot(down, across, index + 1) for index in range(number)]


def _line(ax: Axes, x: Sequence[float], y: Sequence[float | None], row: ReportRow, look: Look) -> None:
    """Draw a row's line; missing and non-finite values leave gaps."""
    y = [value if value is not None and math.isfinite(value) else math.nan for value in y]
    if all(map(math.isnan, y)):
        return
    style = {"color": look.color, "linestyle": look.dashes, "marker": look.marker, "markersize": 3.5}
    ax.plot(x, y, **style, label=label(row["name"]), alpha=BEATEN if look.beaten else 1)


def _y_values(ax: Axes) -> list[float]:
    return [y for line in ax.lines for y in line.get_ydata() if math.isfinite(y)]


def _with_legend(figure: Figure, axes: list[Axes]) -> Figure:
    """Add one legend below all panels with the lines of every panel; beaten rows come last."""
    handles = {text: handle for ax in axes for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    handles = dict(sorted(handles.items(), key=lambda each: each[1].get_alpha() == BEATEN))
    style = {"ncols": 5, "handlelength": 2.6, "labelcolor": INK}
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", **style)
    return figure


def positive(value: float | None) -> bool:
    """Return whether a value is finite and positive, as a logarithmic axis needs."""
    return value is not None and math.isfinite(value) and value > 0


def _columns(pairs: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]
