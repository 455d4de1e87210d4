"""Settings of a conversion to fewer KV heads. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.engines.limits import Engine

Method = Literal["fisher", "kv-heads", "mean-pool", "key-norm"]


@dataclass(frozen=True)
class KVHeadsSettings(ConversionSettings):
    """Settings of ``surgery convert --to gqa`` and ``--to mqa``, which keeps one head."""

    method: Method = setting(
        "fisher",
        "Conversion method.",
        plugins="kv_heads_methods",
        more="fisher weights heads by the loss; the others are for comparison.",
        section="Method",
    )
    kv_ratio: float | None = setting(None, unset="0.5", section="Budget")
    kv_heads: int | None = setting(
        None,
        "KV heads to keep per layer, instead of a ratio.",
        more="1 is multi-query attention. The number must divide the KV heads of the source.",
        unset="half of them",
        least=1,
    )
    engine: Engine | None = setting(None, "Engine that must load the result, or all.", section="Output")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is not None and self.kv_ratio is not None:
            raise SurgeryError("pass kv_heads or kv_ratio, not both", setting="kv_heads")

    def ending(self, target: str) -> str:
        """Return the ending of the default output name: "mqa" for one head, whichever target is named."""
        return super().ending("mqa" if self.kv_heads == 1 else target)
