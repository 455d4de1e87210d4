"""Settings of a conversion to low rank. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from surgery.calibration.settings import NO_CALIBRATION
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.structures.kept_layers import keep_layers
from surgery.structures.settings import RowSettings, first_tokens_setting, refuse_changed

Method = Literal["fisher", "separate", "svd-llm", "asvd", "cskv", "palu", "think"]


@dataclass(frozen=True)
class LowRankSettings(RowSettings):
    """Settings of ``surgery convert --to lowrank``."""

    method: Method = setting(
        "fisher",
        "How the transform is found.",
        plugins="low_rank_methods",
        more="fisher: one latent for keys and values, weighted by the loss; the others are for comparison.",
        section="Method",
    )
    rank: int | None = setting(
        None,
        "Numbers per token and layer, in place of a ratio.",
        unset="a quarter of the source's",
        least=1,
        section="Budget",
    )
    allocate: Literal["auto", "uniform", "spectrum"] = setting(
        "auto",
        "Ranks of layers: uniform or spectrum (by what is dropped).",
        more="auto: spectrum where that compares layers by the loss (fisher, separate), uniform elsewhere. Method palu "
        "has its own way. Cross-layer groups are uniform.",
        section="Method",
        advanced=True,
    )
    rank_multiple: int = setting(1, "Every rank is a multiple of it.", least=1, advanced=True)
    window: int = setting(
        0,
        "Recent tokens that stay exact.",
        more="A query reads them exactly, its own included; they count in the bytes.",
        least=0,
        section="Budget",
    )
    sinks: int | None = first_tokens_setting(" or beside a window")
    keep_layers: str = keep_layers()

    AUTO_METHOD: ClassVar[str] = "fisher"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.kv_ratio is not None:
            raise SurgeryError("give rank or kv_ratio, not both", setting="rank")
        if self.sinks is None and self.bits != "auto":
            object.__setattr__(self, "sinks", 0)
        if self.sinks and not self.window and self.bits is None:
            raise SurgeryError(f"{self.sinks} sinks and a window of {self.window}: sinks need a window of at least 1")
        if self.bits == "auto":
            usual = type(self).__dataclass_fields__["allocate"].default
            conflicts = {"rank": self.rank is not None, "rank_multiple": self.rank_multiple != 1}
            conflicts |= {
                "allocate": self.allocate not in (usual, "spectrum"),
                "method": self.method != self.AUTO_METHOD,
            }
            conflicts |= {"window": self.window != 0, "calibration": self.calibration == NO_CALIBRATION}
            refuse_changed(
                conflicts, f"bits auto chooses ranks and bits by the loss, of method {self.AUTO_METHOD} on text"
            )
