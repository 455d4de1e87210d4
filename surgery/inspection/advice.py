"""Advice before any text was read: the conversion of the best quality, the smallest, one for each engine.

Bytes and engines are those of this checkpoint. What loses least is not: options have their ranks from SmolLM2-135M
(docs/results.md), where a quarter of the bytes cost 0.0002 nats in low rank with chosen bits, 0.0118 as a plain 4-bit
cache (a third), 0.2522 in low rank alone and more in MLA and fewer heads, which healing wins back.
``surgery plan`` measures the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from surgery.engines.verdict import loads
from surgery.inspection.targets import places

SELF = "transformers"


def advice(targets: Sequence[dict[str, Any]], smallest: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Rows of :func:`surgery.inspection.targets.forecast_targets` to take.

    Args:
        smallest: rows that stand in no table, of a smaller budget.

    Returns:
        "quality" and "smallest", rows, and "engines", rows by the engine that ran such a checkpoint or whose own check
        takes it; nothing where nothing applies. What has a caution is left out.
    """
    can = [row for row in targets if row["applies"] and not row["caution"]]
    if not can:
        return {}
    order = places()
    least = [*can, *(row for row in smallest if row["applies"])]
    # What engines read as it is stands before what has to be rebuilt at every step, in the order of the targets.
    names = [row["to"] for row in can]
    engines = {}
    for name in can[0]["engines"]:
        taking = [row for row in reversed(can) if loads(row["engines"][name])]
        if taking and name != SELF:
            engines[name] = min(taking, key=lambda row: (names.index(row["to"]), name not in row["command"]))
    return {
        "quality": min(can, key=lambda row: order.get(row["command"], len(order))),
        # At the longest context: there a window that is kept whole weighs little.
        "smallest": min(least, key=lambda row: list(row["kv_ratio_at"].values())[-1]),
        "engines": engines,
    }
