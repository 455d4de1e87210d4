"""mlx-lm, whose code was read; nothing was run."""

from __future__ import annotations

from surgery.engines.facts import MLA, OWN, Facts
from surgery.engines.verdict import NOT_TRIED, REFUSED, Verdict

NAME, VERSION = "mlx-lm", "0.32.2"


def verdict(facts: Facts, path: str) -> Verdict:
    """Its ``deepseek_v3.py`` honours biases and reads frequency lists from another key."""
    said = {"engine": NAME, "version": VERSION, "device": "Apple silicon"}
    reason = None
    if facts.structure == OWN:
        reason = "the model class of this package"
    elif facts.structure == MLA and facts.frequency_list:
        reason = "it does not read the frequency list"
    if reason:
        return Verdict(**said, status=REFUSED, command=None, reason=reason, remedy="convert with --engine mlx")
    longer = ", which attends to all tokens where this model has windows" * (facts.kind == "gemma2 with a window")
    return Verdict(
        **said,
        status=NOT_TRIED,
        command=f"mlx_lm.server --model {path}",
        reason=f"read in its source{longer}, never run",
        **facts.cache(facts.number_bytes),
    )
