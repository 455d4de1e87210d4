"""Settings of a conversion to a cascade. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.structures.kept_layers import keep_layers
from surgery.structures.settings import RowSettings

RATIO = 0.125
"""Default KV ratio. SmolLM2-135M as a cascade loses 0.0176 there, about as much as MLA in bits with twice the bytes
(docs/smollm2/rows/report.md)."""
GROUP, SMALL_RATIO_GROUP, SMALL_RATIO = 3, 6, 0.1
"""Default sizes of groups, and the ratio below which the larger one is used. SmolLM2-135M as a cascade at a sixteenth
of the bytes lost 0.1848 with groups of 3 and 0.1168 with groups of 6 (docs/research/bits.md)."""


@dataclass(frozen=True)
class CrossLayerSettings(RowSettings):
    """Settings of ``surgery convert --to crosslayer``."""

    method: Literal["cascade"] = setting(
        "cascade",
        "Conversion method.",
        more="cascade: each layer caches its own latents and also reads those of the earlier layers in its group.",
        section="Method",
        advanced=True,
    )
    kv_ratio: float | None = setting(None, unset=f"{RATIO:g}", section="Budget")
    group_size: int | None = setting(
        None,
        "Number of adjacent layers in a group.",
        more="Larger groups lose less at equal bytes, and a step reads more latents.",
        unset=f"{GROUP}; {SMALL_RATIO_GROUP} below a tenth of the bytes",
        section="Budget",
    )
    bits: Literal["auto"] = setting("auto", section="Bits", advanced=True)
    sinks: int | None = setting(None, unset="4", least=0, section="Bits")
    keep_layers: str = keep_layers()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_text("crosslayer")
        if self.layers_per_group < 2:
            raise SurgeryError(
                f"group_size must be at least 2, not {self.group_size}; use --to lowrank for single layers",
                setting="group_size",
            )

    def ending(self, target: str) -> str:
        """Return the ending of the default output name."""
        return target

    @property
    def layers_per_group(self) -> int:
        """Number of layers in a group: ``group_size``, or its default."""
        if self.group_size is not None:
            return self.group_size
        return SMALL_RATIO_GROUP if (self.kv_ratio or RATIO) < SMALL_RATIO else GROUP
