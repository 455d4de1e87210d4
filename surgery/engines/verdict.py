"""Verdict of an engine on a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LOADS, LOADS_WITH, REFUSED, NOT_TRIED = "loads", "loads with its command", "refused", "not tried"
OPEN = "open"
"""Status in a dry run where the outcomes of the conversion differ in it."""


@dataclass(frozen=True)
class Verdict:
    """One engine's answer; plain values only.

    Attributes:
        engine: its name, with the device where that decides.
        version: that was tried or read; ``device``: on which.
        status: LOADS, LOADS_WITH (the flags in the command are needed), REFUSED, NOT_TRIED or OPEN.
        command: what serves the checkpoint there; None where nothing does.
        reason: who says so: the trial behind a yes, what stands in the way of it.
        cache_bytes_per_token: that the engine allocates for all layers, unless told to store other numbers.
        cache_bytes_per_request: beside them, whatever its length: the first and last tokens of streaming heads, and
            first tokens in full precision; None if there are none. Engines round up to whole blocks, and add the tokens
            of streaming heads that are under way.
        remedy: flag of a conversion that changes a refusal.
    """

    engine: str
    version: str
    device: str
    status: str
    command: str | None
    reason: str
    cache_bytes_per_token: int | None = None
    cache_bytes_per_request: int | None = None
    remedy: str | None = None

    @property
    def loads(self) -> bool:
        return self.status in (LOADS, LOADS_WITH)

    @property
    def text(self) -> str:
        """Text of one line."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.status}: {self.reason}{remedy}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text}


def merged(tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Tables of the possible outcomes as one: the last, with OPEN where the outcomes differ in status."""
    rows = {}
    for engine, last in tables[-1].items():
        statuses = {table[engine]["status"] for table in tables}
        if len(statuses) > 1:
            facts = {name: value for name, value in last.items() if name != "text"}
            reason = f"the conversion decides between {' and '.join(sorted(statuses))}; {last['reason']}"
            rows[engine] = Verdict(**{**facts, "status": OPEN, "command": None, "reason": reason}).to_dict()
        else:
            rows[engine] = dict(last)
    return rows


def loads(verdict: Mapping[str, Any]) -> bool:
    """Return whether a verdict, as plain values, is a yes."""
    return verdict["status"] in (LOADS, LOADS_WITH)


def ran(verdict: Mapping[str, Any]) -> bool:
    """Return whether a verdict is that of a test, not of the engine's own check."""
    return loads(verdict) and verdict["reason"].startswith("ran in")


OVERRIDE = (
    "keep q_a_proj and kv_a_proj_with_mqa in bfloat16 (llama-quantize --tensor-type attn_kv_a_mqa=bf16; the list of "
    "modules not to convert of bitsandbytes, AWQ, GPTQ and fp8), or convert the source again with this version"
)


def told_ruin(formats: Iterable[str]) -> str:
    """A sentence on formats that ruin a checkpoint."""
    return f"Ruined by {', '.join(formats)}: {OVERRIDE}."
