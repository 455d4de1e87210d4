"""Settings of a conversion to low rank. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.calibration.settings import NO_CALIBRATION
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.structures.kept_layers import keep_layers
from surgery.structures.settings import RowSettings, first_tokens_setting, refuse_changed

Method = Literal["fisher", "separate", "svd-llm", "palu"]


@dataclass(frozen=True)
class LowRankSettings(RowSettings):
    """Settings of ``surgery convert --to lowrank``."""

    method: Method = setting(
        "fisher",
        "Conversion method.",
        plugins="low_rank_methods",
        more="fisher: one latent for keys and values, weighted by the loss; the others are for comparison.",
        section="Method",
    )
    rank: int | None = setting(
        None,
        "Elements per token and layer, instead of a ratio.",
        unset="a quarter of the source's",
        least=1,
        section="Budget",
    )
    allocate: Literal["auto", "uniform", "spectrum"] = setting(
        "auto",
        "Allocation of ranks to layers: uniform or spectrum (by the dropped energy).",
        more="auto: spectrum for the methods weighted by the loss (fisher, separate), otherwise uniform. Method palu "
        "has its own allocation.",
        section="Method",
        advanced=True,
    )
    window: int = setting(
        0,
        "Residual window: recent tokens kept in full precision.",
        more="It includes the query's own token and counts in the bytes.",
        least=0,
        section="Budget",
    )
    sinks: int | None = first_tokens_setting(" or next to a residual window")
    keep_layers: str = keep_layers()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.kv_ratio is not None:
            raise SurgeryError("pass rank or kv_ratio, not both", setting="rank")
        if self.sinks is None and self.bits != "auto":
            object.__setattr__(self, "sinks", 0)
        if self.sinks and not self.window and self.bits is None:
            raise SurgeryError(f"sinks {self.sinks}: sinks need a window of at least 1; pass --window")
        if self.bits == "auto":
            conflicts = {"rank": self.rank is not None, "allocate": self.allocate not in ("auto", "spectrum")}
            conflicts |= {"method": self.method != "fisher"}
            conflicts |= {"window": self.window != 0, "calibration": self.calibration == NO_CALIBRATION}
            refuse_changed(conflicts, "bits auto requires method fisher, calibration text and its own allocation")
