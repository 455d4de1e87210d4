"""What a user can ask of a slice. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError

ALLOCATIONS = ("auto", "uniform", "spectrum")


@dataclass(frozen=True)
class SliceSettings(ConversionSettings):
    """Settings of ``surgery slice``. Calibration text serves to measure the loss only.

    Attributes:
        kv_ratio: share of the KV bytes per token of what the latents were made from, as in the conversion.
        allocate: "spectrum": by the energies of the conversion's report; "uniform": the same share of every layer;
            "auto": what has the least held-out loss of both and their mean, where energies of layers compare and the
            class holds ranks that differ.
    """

    allocate: str = "auto"

    def __post_init__(self) -> None:
        self._check_choice("allocate", ALLOCATIONS)
        super().__post_init__()
        if self.kv_ratio is None:
            raise SurgeryError("slice: say how much to keep with --kv-ratio, such as 0.125")
