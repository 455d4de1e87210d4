"""What serving engines do with a checkpoint: one model of them, from which every report, card and verb speaks.

A verdict is "loads" only where a test of ours ran that kind of checkpoint in that engine, or where the engine's own
check function accepts it; what nobody tried is "not tried" (:mod:`surgery.engines.trials`).
"""

from surgery.engines.facts import OWN_CLASSES, Facts
from surgery.engines.limits import ENGINES, MLALimits, cache_dtype_flags, mla_limits
from surgery.engines.table import ANY, engine_table, refuse_unless_loadable, spoken, verdicts
from surgery.engines.verdict import (
    LOADS,
    LOADS_WITH,
    NOT_TRIED,
    OPEN,
    REFUSED,
    Verdict,
    loads,
    merged,
    ran,
    told_ruin,
)

__all__ = [
    "ANY",
    "ENGINES",
    "LOADS",
    "LOADS_WITH",
    "NOT_TRIED",
    "OPEN",
    "OWN_CLASSES",
    "REFUSED",
    "Facts",
    "MLALimits",
    "Verdict",
    "cache_dtype_flags",
    "engine_table",
    "loads",
    "merged",
    "mla_limits",
    "ran",
    "refuse_unless_loadable",
    "spoken",
    "told_ruin",
    "verdicts",
]
