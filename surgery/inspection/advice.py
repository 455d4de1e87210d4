"""What to take, as far as it is known before any text was read: the best in quality, the smallest, one for each engine.

Bytes and engines are those of this checkpoint. What loses least is not: the order below is that of SmolLM2-135M
(docs/results.md), where a quarter of the bytes cost 0.0002 nats in low rank with chosen bits, 0.0118 as plain 4-bit
codes (a third), 0.2522 in low rank alone and more in MLA and fewer heads, which healing wins back.
``surgery plan`` measures the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from surgery.engines import loads

COMMAND = "surgery convert "
QUALITY = ("--to lowrank --bits auto --sinks 4", "--to quantized", "--to lowrank", "--to mla --carrier own", "--to mla")
"""From what lost least; what follows is as it stands in the table."""
SERVED = ("mla", "gqa", "mqa", "lowrank")
"""For engines: what they read as it is, before what has to be rebuilt at every step."""
SELF = "transformers"


def advice(targets: Sequence[dict[str, Any]], smallest: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Rows of :func:`surgery.inspection.targets.foreseen_targets` to take.

    Args:
        smallest: rows that stand in no table, of a smaller budget.

    Returns:
        "quality" and "smallest", rows, and "engines", rows by the engine that ran such a checkpoint or whose own check
        takes it; nothing where nothing applies. Hybrids are left out: which heads may stream shows on text alone.
    """
    can = [row for row in targets if row["applies"] and row["to"] != "hybrid"]
    if not can:
        return {}
    order = {COMMAND + command: place for place, command in enumerate(QUALITY)}
    least = [*can, *(row for row in smallest if row["applies"])]
    served = [row for row in reversed(can) if row["to"] in SERVED]
    engines = {}
    for name in can[0]["engines"]:
        taking = [row for row in served if loads(row["engines"][name])]
        if taking and name != SELF:
            engines[name] = min(taking, key=lambda row: (SERVED.index(row["to"]), name not in row["command"]))
    return {
        "quality": min(can, key=lambda row: order.get(row["command"], len(order))),
        "smallest": min(least, key=lambda row: row["kv_ratio"]),
        "engines": engines,
    }
