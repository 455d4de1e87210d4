"""Verdict of an engine on a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LOADS, LOADS_WITH, REFUSED, NOT_TRIED = "loads", "loads with its command", "refused", "not tried"
OPEN = "open"
"""Status in a dry run if the possible outcomes of the conversion differ."""


@dataclass(frozen=True)
class Verdict:
    """An engine's verdict on a checkpoint; plain values only.

    Attributes:
        engine: name of the engine, with the device if the verdict depends on it.
        version: version that was tried or read; ``device``: the device.
        status: LOADS, LOADS_WITH (the flags in the command are required), REFUSED, NOT_TRIED or OPEN.
        command: command that serves the checkpoint; None if there is none.
        reason: the trial or check that supports a yes, or the obstacle.
        cache_bytes_per_token: bytes that the engine allocates per token over all layers, at its default cache dtype.
        cache_bytes_per_request: additional bytes per request of any length: first and last tokens of streaming heads,
            and first tokens in full precision; None if there are none. Engines round up to whole blocks, and add the
            tokens of streaming heads that are being processed.
        remedy: conversion command whose result the engine would load.
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
        """One-line summary."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.status}: {self.reason}{remedy}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text}


def merged(tables: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge the tables of possible outcomes: the last table, with OPEN for engines whose status differs."""
    rows = {}
    for engine, last in tables[-1].items():
        statuses = {table[engine]["status"] for table in tables}
        if len(statuses) > 1:
            facts = {name: value for name, value in last.items() if name != "text"}
            reason = f"{' or '.join(sorted(statuses))}, depending on the conversion; {last['reason']}"
            rows[engine] = Verdict(**{**facts, "status": OPEN, "command": None, "reason": reason}).to_dict()
        else:
            rows[engine] = dict(last)
    return rows


def loads(verdict: Mapping[str, Any]) -> bool:
    """Return whether a verdict, as plain values, is positive."""
    return verdict["status"] in (LOADS, LOADS_WITH)


def ran(verdict: Mapping[str, Any]) -> bool:
    """Return whether a positive verdict comes from a test, not from the engine's own check."""
    return loads(verdict) and verdict["reason"].startswith("ran in")


OVERRIDE = (
    "keep q_a_proj and kv_a_proj_with_mqa in bfloat16 (llama-quantize --tensor-type attn_kv_a_mqa=bf16; the list of "
    "modules not to convert of bitsandbytes, AWQ, GPTQ and fp8), or convert the source again with this version"
)


def ruin_warning(formats: Iterable[str]) -> str:
    """Format a sentence about the formats that ruin a checkpoint."""
    return f"Ruined by {', '.join(formats)}: {OVERRIDE}."
