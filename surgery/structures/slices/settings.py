"""Settings of a slice. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.structures.settings import keep_quantised


@dataclass(frozen=True)
class SliceSettings(ConversionSettings):
    """Settings of ``surgery slice``. Text is used to measure the loss only."""

    kv_ratio: float | None = setting(
        None,
        "Share of the KV bytes of the model that it was converted from; needed.",
        above=0,
        below=1,
        section="Budget",
    )
    allocate: Literal["auto", "uniform", "spectrum"] = setting(
        "auto",
        "Ranks of layers: spectrum, by what their latents are worth, or uniform.",
        more="auto: what has the least held-out loss of both and their mean, where energies of layers compare and the "
        "class holds ranks that differ.",
    )
    keep_quantised: bool = keep_quantised()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_ratio is None:
            raise SurgeryError("slice: say how much to keep with --kv-ratio, such as 0.125")
