"""Recommended conversions before any calibration: the best quality, the smallest cache, and one for each engine.

KV bytes and engine support are computed for this checkpoint. The ranking by quality is not: it is that of SmolLM2-135M
(docs/results.md). ``surgery plan`` measures the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from surgery.engines.verdict import loads
from surgery.inspection.targets import option_ranks

SELF = "transformers"


def advice(targets: Sequence[dict[str, Any]], smallest: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Choose the recommended rows of :func:`surgery.inspection.targets.forecast_targets`.

    Args:
        smallest: additional rows with smaller budgets (:func:`surgery.inspection.targets.smallest_targets`).

    Returns:
        "quality" and "smallest": a row each; "engines": a row for each engine that loads one, by test or by its own
        check. Empty if no target applies. Rows with a caution are left out, except from ``smallest``.
    """
    applicable = [row for row in targets if row["applies"] and not row["caution"]]
    if not applicable:
        return {}
    ranks = option_ranks()
    all_sizes = [*applicable, *(row for row in smallest if row["applies"])]
    # In the order of the targets, caches that engines read directly precede those that are rebuilt at every step.
    names = [row["to"] for row in applicable]
    engines = {}
    for name in applicable[0]["engines"]:
        loadable = [row for row in reversed(applicable) if loads(row["engines"][name])]
        if loadable and name != SELF:
            engines[name] = min(loadable, key=lambda row: (names.index(row["to"]), name not in row["command"]))
    return {
        "quality": min(applicable, key=lambda row: ranks.get(row["command"], len(ranks))),
        # At the longest context, where a full-precision window matters little.
        "smallest": min(all_sizes, key=lambda row: list(row["kv_ratio_at"].values())[-1]),
        "engines": engines,
    }
