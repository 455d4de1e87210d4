"""Settings of a conversion to caches that layers share. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.structures.kept_layers import AUTO
from surgery.structures.low_rank.settings import LowRankSettings

GROUP, SMALL_RATIO_GROUP, SMALL_RATIO = 3, 6, 0.1
"""Default sizes of groups, and the ratio below which packed rows use the larger one. SmolLM2-135M as a cascade in bits
at a sixteenth of the bytes lost 0.1848 with groups of 3 and 0.1168 with groups of 6 (docs/research/bits.md)."""

Method = Literal["xkv", "cascade", "minicache"]


@dataclass(frozen=True)
class CrossLayerSettings(LowRankSettings):
    """Settings of ``surgery convert --to crosslayer``; ``bits`` is for method cascade only."""

    method: Method = setting(
        "xkv",
        "Conversion method.",
        more="xkv: one basis per group, whose layers share one latent. cascade: each layer caches its own latents and "
        "also reads those of the earlier layers in its group. minicache, for comparison: adjacent layers are "
        "merged in pairs.",
        section="Method",
    )
    allocate: Literal["uniform"] = setting("uniform", section="Method")
    group_size: int | None = setting(
        None,
        "Number of adjacent layers in a group.",
        more="Larger groups lose less at equal bytes, and a step reads more latents.",
        unset="3; 6 for bits auto below a tenth of the bytes",
        section="Budget",
    )
    block: int = setting(
        64,
        "Tokens buffered in full precision before they are compressed together; not for method cascade.",
        least=1,
        advanced=True,
    )
    bits: Literal["auto"] | None = setting(
        None,
        more="For method cascade only, which predicts a layer's values from those of the group's earlier layers.",
        section="Bits",
    )

    AUTO_METHOD = "cascade"

    def __post_init__(self) -> None:
        if self.bits is not None and self.method != "cascade":
            raise SurgeryError(
                f"bits: the shared cache of method {self.method} cannot be quantized; use method cascade",
                setting="bits",
            )
        super().__post_init__()
        if self.keep_layers != AUTO and self.method != "cascade":
            raise SurgeryError(
                f"keep_layers: method {self.method} converts all layers; use method cascade", setting="keep_layers"
            )
        if self.layers_per_group < 2:
            raise SurgeryError(
                f"group_size must be at least 2, not {self.group_size}; use --to lowrank for single layers",
                setting="group_size",
            )

    @property
    def layers_per_group(self) -> int:
        """Number of layers in a group: ``group_size``, or its default."""
        if self.group_size is not None:
            return self.group_size
        small = self.bits == "auto" and self.kv_ratio is not None and self.kv_ratio < SMALL_RATIO
        return SMALL_RATIO_GROUP if small else GROUP
