"""Settings of a conversion to hybrid heads. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.structures.settings import StructureSettings


@dataclass(frozen=True)
class HybridSettings(StructureSettings):
    """Settings of ``surgery convert --to hybrid``. Text is used to measure the loss only; nothing is calibrated."""

    heads: str | None = setting(
        None,
        "Pattern of `surgery heads`, DuoAttention or PruLong: which heads stay full.",
        unset="none, if all heads stream",
        section="Heads",
        metavar="FILE",
    )
    kv_ratio: float | None = setting(None, unset="0.5", section="Budget")
    context: int | None = setting(
        None, "Tokens at which the ratio is counted.", least=1, unset="the model's limit", section="Heads"
    )
    streaming: float | None = setting(
        None,
        "Share of the heads that stream, in place of a ratio; 1 is StreamingLLM and needs no pattern.",
        least=0,
        most=1,
    )
    sinks: int | None = setting(
        None, "First tokens that streaming heads keep.", least=0, unset="the pattern's, or 64", section="Budget"
    )
    recent: int | None = setting(
        None,
        "Last tokens that streaming heads keep, the query's own among them.",
        least=1,
        unset="the pattern's, or 256",
        flag="window",
    )
    compensated: float = setting(
        0.0,
        "Share of the streaming heads that also read the mean of what they dropped.",
        more="The best of them, as RazorAttention does.",
        least=0,
        most=1,
        section="Heads",
        advanced=True,
    )
    granularity: Literal["head", "layer"] = setting(
        "head",
        "What streams: single heads, or whole layers, in a stock class with sliding windows and without sinks.",
        advanced=True,
    )
    heads_multiple: int = setting(
        1, "Every layer's full heads are a multiple of it, for tensor parallelism.", least=1, advanced=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_ratio is not None and self.streaming is not None:
            raise SurgeryError("give kv_ratio or streaming, not both", setting="streaming")
        if self.granularity == "layer":
            if self.sinks:
                raise SurgeryError(
                    "granularity layer: sliding windows of stock classes keep no sinks; leave them out",
                    setting="granularity",
                )
            if self.compensated or self.heads_multiple != 1:
                raise SurgeryError(
                    "granularity layer: compensated and heads_multiple are of single heads", setting="granularity"
                )
            object.__setattr__(self, "sinks", 0)
