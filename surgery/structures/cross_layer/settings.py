"""Settings of a conversion to caches that layers share. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.structures.kept_layers import AUTO
from surgery.structures.low_rank.settings import LowRankSettings

Method = Literal["xkv", "cascade", "minicache"]


@dataclass(frozen=True)
class CrossLayerSettings(LowRankSettings):
    """Settings of ``surgery convert --to crosslayer``; ``bits`` is for method cascade only."""

    method: Method = setting(
        "xkv",
        "How the transform is found.",
        more="xkv: one basis for the group, a token stored once it has left the group. cascade: every layer caches its "
        "own latents and reads those of the group's earlier layers too. For comparison minicache: adjacent layers "
        "merged in pairs.",
        section="Method",
    )
    allocate: Literal["uniform"] = setting("uniform", section="Method")
    group_size: int = setting(3, "Adjacent layers in a group.", section="Budget")
    block: int = setting(
        64, "Tokens that stay exact until they are as many, in all methods but cascade.", least=1, advanced=True
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
                f"bits: the store that layers share in method {self.method} is not quantized; use cascade",
                setting="bits",
            )
        super().__post_init__()
        if self.keep_layers != AUTO and self.method != "cascade":
            raise SurgeryError(
                f"keep_layers: method {self.method} converts all layers; use cascade", setting="keep_layers"
            )
        if self.group_size < 2:
            raise SurgeryError(
                f"group_size {self.group_size}: a group has two layers at least; --to lowrank has one",
                setting="group_size",
            )
