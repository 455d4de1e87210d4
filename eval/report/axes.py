"""Axis scales and ticks of report plots."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from surgery.common.human import count
from surgery.eval.report.style import MUTED
from surgery.eval.report.tables import signed


def context_axis(ax: Axes, contexts: list[int]) -> None:
    """Format a log2 x axis of context lengths, with ticks at the measured contexts, thinned to at most six."""
    ticks = sorted(set(contexts))
    ax.set_xscale("log", base=2)
    _ticks(ax.xaxis, ticks[:: -(-len(ticks) // 6)], lambda value: f"{value:,.0f}")
    ax.set_xlabel("context, tokens")


def share_axis(ax: Axes, values: list[float]) -> None:
    """Format a log2 x axis of shares, with a tick at every power of two."""
    low, high = min(values) / 1.3, max(values) * 1.3
    ax.set_xscale("log", base=2)
    ax.set_xlim(low, high)
    ticks = [2.0**power for power in range(-10, 11) if low <= 2.0**power <= high]
    _ticks(ax.xaxis, ticks or sorted(set(values)), lambda value: f"{100 * value:.3g}%")


def decades_axis(ax: Axes, values: list[float]) -> None:
    """Format a log10 y axis of positive values, with ticks at 1, 2, 5, or at 1 only if the range exceeds 300x."""
    low, high = min(values), max(values)
    steps = (1, 2, 5) if high < 300 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ax.set_yscale("log")
    pad = max((high / low) ** 0.06, 1.1)
    ax.set_ylim(low / pad, high * pad)
    _ticks(ax.yaxis, [step * 10.0**power for power in powers for step in steps], _plain)


def change_axis(ax: Axes, values: list[float], *, linear: bool = False) -> None:
    """Format a y axis of changes with a line at zero; symlog if outliers dwarf small changes, unless `linear`."""
    sizes = sorted(abs(value) for value in values if value)
    ax.axhline(0, color=MUTED, linewidth=0.7, zorder=0)
    if not sizes:
        return
    small = sizes[len(sizes) // 4]
    if sizes[-1] > 12 * small and not linear:
        ax.set_yscale("symlog", linthresh=small, linscale=1.2)
        steps = [m * 10.0**power for power in range(-7, 5) for m in (1, 3)]
        ticks = [step for step in steps if small / 2.5 <= step <= sizes[-1] * 1.3]
        ax.yaxis.set_major_locator(FixedLocator([*(-step for step in ticks), 0, *ticks]))
        low, high = min(0, *values), max(0, *values)
        ax.set_ylim(1.3 * low - small / 3, 1.3 * high + small / 3)
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if abs(value) < 1e-12 else _signed(value)))


def _ticks(axis: Axis, locations: list[float], form) -> None:
    axis.set_major_locator(FixedLocator(locations))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    return count(value) if value >= 10_000 else f"{value:,.5g}"


def _signed(value: float) -> str:
    """Format a tick with as many decimals as needed: 0.003, 2.5, 40."""
    digits = next((d for d in range(8) if abs(value * 10**d - round(value * 10**d)) < 1e-6), 8)
    return signed(value, digits)
