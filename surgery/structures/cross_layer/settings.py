"""What a user can ask of a conversion to caches that layers share. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from surgery.common.errors import SurgeryError
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.settings import StructureSettings

METHODS = ("xkv", "cascade", "xkv-prompt", "minicache")


@dataclass(frozen=True)
class CrossLayerSettings(LowRankSettings):
    """Settings of ``surgery convert --to crosslayer``; configs/crosslayer.yaml holds the same with comments.

    Attributes:
        method: "xkv": one basis for the group, a token stored once it has left the group; "cascade": every layer caches
            its own latents and reads those of the group's earlier layers too; "xkv-prompt": the paper's basis, from
            each prompt; "minicache": adjacent pairs of layers merged.
        group_size: adjacent layers in a group.
        block: tokens that stay exact until they are as many, in all methods but cascade; see docs/cross-layer.md.
        fit_steps, fit_iterations, fit_queries: method cascade only.
    """

    method: str = "xkv"
    allocate: str = "uniform"
    group_size: int = 3
    block: int = 64

    METHODS: ClassVar[tuple[str, ...]] = METHODS
    BITS: ClassVar[tuple[str, ...]] = StructureSettings.BITS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("block")
        if self.quantizes and self.method != "cascade":
            raise SurgeryError(f"bits: the store that layers share in method {self.method} holds no codes; use cascade")
        if self.group_size < 2:
            raise SurgeryError(f"group_size {self.group_size}: a group has two layers at least; --to lowrank has one")
        if self.allocate != "uniform":
            raise SurgeryError("allocate: ranks of cross-layer groups are uniform")
