"""Settings of a conversion to hybrid heads. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting


@dataclass(frozen=True)
class HybridSettings(ConversionSettings):
    """Settings of ``surgery convert --to hybrid``. Text is used to measure the loss only; nothing is calibrated."""

    heads: str | None = setting(
        None,
        "Pattern file of `surgery heads`, DuoAttention or PruLong, which ranks the heads.",
        unset="none, if all heads stream",
        section="Heads",
        metavar="FILE",
    )
    kv_ratio: float | None = setting(None, unset="0.5", section="Budget")
    context: int | None = setting(
        None, "Context length at which the ratio is computed.", least=1, unset="the model's limit", section="Heads"
    )
    streaming: float | None = setting(
        None, "Share of heads that stream, instead of a ratio; 1 is StreamingLLM and needs no pattern.", least=0, most=1
    )
    sinks: int | None = setting(
        None, "First tokens that streaming heads keep.", least=0, unset="the pattern's, or 64", section="Budget"
    )
    recent: int | None = setting(
        None,
        "Recent tokens that streaming heads keep, including the query's own.",
        least=1,
        unset="the pattern's, or 256",
        flag="window",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_ratio is not None and self.streaming is not None:
            raise SurgeryError("pass kv_ratio or streaming, not both", setting="streaming")
