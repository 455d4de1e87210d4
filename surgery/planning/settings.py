"""Settings of ``surgery plan``. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from surgery.calibration.settings import NO_CALIBRATION, ConversionSettings
from surgery.checkpoint.disk import parse_size
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.engines.cache_formats import Server, cache_formats
from surgery.structures.registry import TARGETS

BITS = "bits"
"""Name in ``allow`` of quantized caches, of any attention."""
ENGINE = "engine"
"""Name in ``allow`` of the engine's own cache formats, which need no conversion."""


HELD_OUT_LENGTH = 512
"""Tokens of a held-out sequence.

At twice the length, a plan of SmolLM2 would take 1.5 times as long as a conversion."""


@dataclass(frozen=True)
class PlanSettings(ConversionSettings):
    """Settings of ``surgery plan``."""

    kv_ratio: float | None = setting(
        None, "Share of the source's KV bytes to keep.", unset="from memory or max_loss, else 0.25", section="Budget"
    )
    memory: str | None = setting(
        None, "Memory for the KV cache at that context and batch, in place of a share.", metavar="SIZE"
    )
    max_loss: float | None = setting(
        None,
        "Maximum loss increase in nats per token, instead of a share: the fewest bytes within it are chosen.",
        above=0,
    )
    context: str = setting("32k", "Tokens of a sequence at which bytes are counted; 32k is 32,768.", metavar="N")
    batch: int = setting(1, "Sequences whose caches share the memory.", least=1)
    engine: Server | None = setting(
        None,
        "Only targets that this engine, or all of them, does not refuse, tried or not; and its own cache formats, "
        "which need no conversion.",
    )
    heads: str | None = setting(
        None, "Pattern of `surgery heads`, to include hybrids.", unset="no hybrids", metavar="FILE"
    )
    allow: tuple[str, ...] = setting(
        (),
        "Structures to choose among, bits for quantized caches, and engine for the engine's own.",
        unset="all",
        metavar="A,B",
    )
    held_out: int = setting(
        8,
        "Held-out sequences on which candidates are compared, and as many recall prompts.",
        more="All candidates are compared on a quarter, those close to the best on a half, those still not "
        "distinguishable on all.",
        least=2,
        advanced=True,
    )
    held_out_length: int | None = setting(
        None,
        "Tokens of a held-out sequence, no more than of one of calibration.",
        more="The loss of streaming heads shows only in texts longer than their windows.",
        unset=f"{HELD_OUT_LENGTH}, or with a pattern of heads as many as in calibration",
        least=2,
        advanced=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        budgets = [name for name in ("kv_ratio", "memory", "max_loss") if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise SurgeryError(f"{budgets[0]} and {budgets[1]} exclude each other: pass one budget")
        if self.calibration == NO_CALIBRATION:
            raise SurgeryError(
                "calibration none: a plan measures losses and needs text; set builtin or a file", setting="calibration"
            )
        choices = [*TARGETS, BITS, ENGINE]
        if unknown := [name for name in self.allow if name not in choices]:
            raise SurgeryError(f"unknown allow {unknown[0]}; choose from {', '.join(choices)}", setting="allow")
        if ENGINE in self.allow:
            if self.engine is None:
                raise SurgeryError(
                    "allow engine needs an engine: pass --engine, such as --engine vllm", setting="engine"
                )
            cache_formats(self.engine)  # raises for an engine without own formats
        if self.memory is not None:
            parse_size(self.memory, "memory")  # raises for an invalid size
            if str(self.memory).strip().isdecimal() and self.memory_bytes < 2**20:
                raise SurgeryError(
                    f"memory {self.memory} has no unit, and so is in bytes", setting="memory", hint=f"{self.memory}GiB"
                )
        if self.tokens < 1:
            raise SurgeryError("context must be at least 1", setting="context")

    @property
    def memory_bytes(self) -> int:
        """Bytes of a memory budget."""
        return parse_size(self.memory or "", "memory")

    @property
    def tokens(self) -> int:
        """Context in tokens."""
        return parse_tokens(self.context)

    def allows(self, name: str) -> bool:
        """Return whether ``allow`` includes a structure, `BITS` or `ENGINE`; an empty ``allow`` includes all."""
        return not self.allow or name in self.allow

    @property
    def text_length(self) -> int:
        """Largest number of tokens of a held-out sequence."""
        unset = self.calibration_length if self.heads else HELD_OUT_LENGTH
        return min(self.held_out_length or unset, self.calibration_length)

    def common(self) -> dict[str, Any]:
        """Return the settings that conversions take from the plan: text, seed, machine."""
        shared = {each.name for each in fields(ConversionSettings)} - {"kv_ratio", "held_out"}
        return {name: getattr(self, name) for name in shared}


def beyond_positions(tokens: int, positions: int) -> str | None:
    """Return a warning for a context beyond the model's positions; None for a context within them."""
    if tokens <= positions:
        return None
    return f"context {tokens:,} exceeds the model's {positions:,} positions: KV bytes are computed beyond its limit"


def parse_tokens(text: str) -> int:
    """Parse a number of tokens: ``32k`` (k is 1,024) or a plain number. Raises SurgeryError: the text is neither."""
    match = re.fullmatch(r"\s*([0-9]+)\s*(k?)\s*", str(text).lower().replace(",", "").replace("_", ""))
    if not match:
        raise SurgeryError(f"context must be a number of tokens such as 32k or 32768, not {text!r}", setting="context")
    return int(match[1]) * (1024 if match[2] else 1)
