"""Pareto plots of quality against KV bytes of the live cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from surgery.eval.report.axes import change_axis, share_axis
from surgery.eval.report.document import compared_context, compared_share
from surgery.eval.report.plots import WIDTH
from surgery.eval.report.style import INK, MUTED, Look, label, looks, styled
from surgery.eval.report.tables import Report, ReportRow, bounds, dig
from surgery.eval.report.verdict import pareto_front

HOLLOW = "variant"


@dataclass(frozen=True)
class Point:
    """Row of a report as a point of the plot.

    Attributes:
        x: KV bytes, as a share of the baseline's.
        y: quality, as a change from the baseline.
        low, high: 95% interval of y; equal to y without an interval.
    """

    row: ReportRow
    look: Look
    x: float
    y: float
    low: float
    high: float


@styled
def loss(report: Report) -> Figure | None:
    """Plot the loss change from the baseline in nats per token against the KV share."""
    points = _points(report, "loss")
    return _plot(report, points, "loss", "nats per token", better="low", context=compared_context(report))


@styled
def recall(report: Report) -> Figure | None:
    """Plot the recall change from the baseline in percentage points against the KV share."""
    points = _points(report, "recall", scale=100)
    return _plot(report, points, "recall", "points", better="high")


def _points(report: Report, compared: str, scale: float = 1) -> list[Point]:
    points = []
    for row, look in zip(report["rows"], looks(report), strict=True):
        x = compared_share(row, report) if compared == "loss" else dig(row, "kv", "ratio")
        change = dig(row, "comparison", compared) or {}
        y = 0.0 if row.get("role") == "baseline" else change.get("difference")
        if y is None or not x or not math.isfinite(y):
            continue
        ends = bounds(change)
        low, high = ends if ends and all(map(math.isfinite, ends)) else (y, y)
        points.append(Point(row, look, x, scale * y, scale * low, scale * high))
    return points


def _plot(
    report: Report, points: list[Point], quality: str, unit: str, better: str, context: int | None = None
) -> Figure | None:
    if len(points) < 2:
        return None
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    ax = figure.add_subplot()
    best = [points[i] for i in pareto_front([(p.x, p.y) for p in points], better)]
    rivals = [p for p in points if p.row.get("role") == HOLLOW]
    rivals = [rivals[i] for i in pareto_front([(p.x, p.y) for p in rivals], better)]
    for front, dashes, text in (
        (best, (4, 3), "no row is better at both"),
        (rivals, (1, 2), "no cheap baseline is better at both"),
    ):
        line = {"color": MUTED, "linewidth": 1, "linestyle": (0, dashes), "drawstyle": "steps-post", "zorder": 1}
        if front is best or len(front) > 1:
            ax.plot([p.x for p in front], [p.y for p in front], **line, label=text)
    for point in points:
        # Drawn as an interval, not as an error around y: the interval of a share need not contain the estimate.
        ax.plot([point.x] * 2, [point.low, point.high], color=point.look.color, linewidth=1.4, zorder=2)
        ax.plot(
            [point.x],
            [point.y],
            marker=point.look.marker,
            markersize=7,
            linestyle="none",
            markerfacecolor="none" if point.row.get("role") == HOLLOW else point.look.color,
            markeredgecolor=point.look.color,
            markeredgewidth=1.6,
            zorder=3,
        )
    share_axis(ax, [p.x for p in points])
    heights = [value for p in points for value in (p.y, p.low, p.high)]
    change_axis(ax, heights, linear=better == "high")  # shares are bounded
    where = "" if context is None else f" at {context:,} tokens"
    ax.set_xlabel(f"KV bytes per token{where}, share of the baseline's")
    ax.set_ylabel(f"Δ {quality}, {unit}")
    _legend(ax, {p.row.get("role") for p in points}, better)
    _name_points(figure, ax, points, best)
    return figure


def _legend(ax: Axes, roles: set, better: str) -> None:
    words = {"baseline": ("D", "baseline"), "checkpoint": ("o", "checkpoint"), "variant": ("s", "cheap baseline")}
    for role, (marker, text) in words.items():
        if role in roles:
            fill = "none" if role == HOLLOW else MUTED
            ax.plot([], [], marker=marker, linestyle="none", markerfacecolor=fill, markeredgecolor=MUTED, label=text)
    corner = "upper right" if better == "low" else "lower right"
    ax.legend(loc=corner, labelcolor=INK, title="bars: 95% intervals", alignment="left")


def _name_points(figure: Figure, ax: Axes, points: list[Point], best: list[Point]) -> None:
    """Label every point, at the one of `LABEL_POSITIONS` that overlaps no label and the fewest markers and lines.

    Points of the baseline and the Pareto front come first. A label without a free position is omitted.
    """
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    first = {id(p) for p in points if p.row.get("role") == "baseline"} | set(map(id, best))
    marks = {id(p): ax.transData.transform((p.x, p.y)) for p in points}
    boxes_of_marks = [(x - 7, y - 7, x + 7, y + 7) for x, y in marks.values()]
    boxes_of_marks += _steps([marks[id(p)] for p in best])
    label_boxes = [ax.get_legend().get_window_extent().extents]
    frame = ax.get_window_extent().extents
    for point in sorted(points, key=lambda p: id(p) not in first):
        style = {"fontsize": 8.5, "color": INK, "zorder": 4}
        text = ax.annotate(label(point.row["name"]), (point.x, point.y), (0, 0), textcoords="offset points", **style)
        extent = text.get_window_extent()
        boxes = {
            position: _box(marks[id(point)], extent.width, extent.height, position, scale)
            for position in LABEL_POSITIONS
        }
        free = [
            position
            for position in LABEL_POSITIONS
            if not any(_overlap(boxes[position], other) for other in label_boxes)
        ]
        if not free:
            text.remove()
            continue
        position = min(
            free, key=lambda p: sum(_overlap(boxes[p], t) for t in boxes_of_marks) + 5 * (not _inside(boxes[p], frame))
        )
        text.set(position=position[:2], ha=position[2], va=position[3])
        label_boxes.append(boxes[position])


def _box(mark: tuple, width: float, height: float, position: tuple, scale: float) -> tuple:
    """Compute the bounding box of a label next to its point: left, bottom, right, top in pixels."""
    dx, dy, ha, va = position
    x = mark[0] + dx * scale - {"left": 0, "center": width / 2, "right": width}[ha]
    bottom = mark[1] + dy * scale - {"bottom": 0, "center": height / 2, "top": height}[va]
    return x, bottom, x + width, bottom + height


LABEL_POSITIONS = tuple(
    (dx * reach, dy * reach, ha, va)
    for reach in (1, 2.2, 3.6, 5, 7)
    for dx, dy, ha, va in (
        (8, 0, "left", "center"),
        (7, 7, "left", "bottom"),
        (7, -7, "left", "top"),
        (-8, 0, "right", "center"),
        (-7, 7, "right", "bottom"),
        (-7, -7, "right", "top"),
        (0, 9, "center", "bottom"),
        (0, -9, "center", "top"),
    )
)
"""Candidate positions of a label around its point: offset in points and alignment, best first."""


def _steps(corners: list) -> list[tuple]:
    """Return the bounding boxes of the frontier's steps: horizontal to the x of the next point, then vertical."""
    boxes = []
    for (x, y), (next_x, next_y) in pairwise(corners):
        boxes.append((x, y - 1, next_x, y + 1))
        boxes.append((next_x - 1, min(y, next_y), next_x + 1, max(y, next_y)))
    return boxes


def _overlap(one: tuple, other: tuple) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _inside(box: tuple, frame: tuple) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]
