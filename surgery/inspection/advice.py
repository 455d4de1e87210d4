"""Recommended conversions before any calibration: the best quality, the smallest cache, and one for each engine.

KV bytes and engine support are computed for this checkpoint. The ranking by quality is not: it is that of SmolLM2-135M
(docs/results.md). ``surgery plan`` measures the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from surgery.engines.verdict import loads
from surgery.inspection.targets import places

SELF = "transformers"


def advice(targets: Sequence[dict[str, Any]], smallest: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Choose the recommended rows of :func:`surgery.inspection.targets.forecast_targets`.

    Args:
        smallest: additional rows with smaller budgets (:func:`surgery.inspection.targets.smallest_targets`).

    Returns:
        "quality" and "smallest": a row each; "engines": a row for each engine that loads one, by test or by its own
        check. Empty if no target applies. Rows with a caution are left out, except from ``smallest``.
    """
    can = [row for row in targets if row["applies"] and not row["caution"]]
    if not can:
        return {}
    order = places()
    least = [*can, *(row for row in smallest if row["applies"])]
    # In the order of the targets, caches that engines read directly precede those that are rebuilt at every step.
    names = [row["to"] for row in can]
    engines = {}
    for name in can[0]["engines"]:
        taking = [row for row in reversed(can) if loads(row["engines"][name])]
        if taking and name != SELF:
            engines[name] = min(taking, key=lambda row: (names.index(row["to"]), name not in row["command"]))
    return {
        "quality": min(can, key=lambda row: order.get(row["command"], len(order))),
        # At the longest context, where a full-precision window matters little.
        "smallest": min(least, key=lambda row: list(row["kv_ratio_at"].values())[-1]),
        "engines": engines,
    }
