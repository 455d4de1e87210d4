"""Settings of a slice. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting


@dataclass(frozen=True)
class SliceSettings(ConversionSettings):
    """Settings of ``surgery slice``. Text is used to measure the loss only."""

    kv_ratio: float | None = setting(
        None, "Share of the KV bytes of the original source to keep; required.", above=0, below=1, section="Budget"
    )
    allocate: Literal["auto", "uniform", "spectrum"] = setting(
        "auto",
        "Allocation of ranks to layers: spectrum (by energies of the latents) or uniform.",
        more="auto: uniform, spectrum or their mean, whichever has the lowest held-out loss, if energies are "
        "comparable.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_ratio is None:
            raise SurgeryError("slice: --kv-ratio is required, such as --kv-ratio 0.125")
