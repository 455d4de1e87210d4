"""What a user can ask of a conversion to hybrid heads. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from surgery.common.errors import SurgeryError
from surgery.structures.settings import StructureSettings, with_formats


@dataclass(frozen=True)
class HybridSettings(StructureSettings):
    """Settings of ``surgery convert --to hybrid``; configs/hybrid.yaml holds the same with comments.

    Calibration text serves to measure the loss only; nothing is fitted.

    Attributes:
        heads: pattern file of ``surgery heads``, or of DuoAttention or PruLong; only a plan in which all heads stream
            needs none.
        kv_ratio: share of the source's KV bytes to keep at ``context`` tokens; without it and ``streaming``, a half.
        context: tokens at which the ratio is counted; None: the model's limit. Streaming heads cost the same at any.
        streaming: share of the heads that stream, instead of a ratio; 1 is StreamingLLM.
        sinks, recent: first tokens that streaming heads keep, and last ones with the query's own among them; None:
            those that the pattern was made for.
        compensated: share of the streaming heads, the best of them, that also read the mean of what they dropped.
        heads_multiple: every layer's full heads are a multiple of it, for tensor parallelism over so many devices.
        streaming_bits: of what streaming heads keep; None: as many as of the others.
    """

    heads: str | None = None
    context: int | None = None
    streaming: float | None = None
    sinks: int | None = None
    recent: int | None = None
    compensated: float = 0.0
    heads_multiple: int = 1
    streaming_bits: int | str | None = None

    SINKS_OF_CODES: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming_bits is not None:
            self._check_bits("streaming_bits")
            if not self.quantizes:
                raise SurgeryError("streaming_bits are of a quantised cache: give bits too")
        self._check_positive("context", "recent", "heads_multiple")
        if self.kv_ratio is not None and self.streaming is not None:
            raise SurgeryError("give kv_ratio or streaming, not both")
        for name in ("streaming", "compensated"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise SurgeryError(f"{name} {share}: a share of heads lies between 0 and 1")

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        return with_formats(super().kv_cache(), streaming_format=self.streaming_bits)
