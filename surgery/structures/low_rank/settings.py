"""What a user can ask of a conversion to low rank. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from surgery.calibration.settings import NO_CALIBRATION
from surgery.common.errors import SurgeryError
from surgery.structures.settings import StructureSettings

METHODS = ("fisher", "separate", "svd-llm", "asvd", "cskv", "palu", "think")
ALLOCATIONS = ("auto", "uniform", "spectrum", "greedy")


@dataclass(frozen=True)
class LowRankSettings(StructureSettings):
    """Settings of ``surgery convert --to lowrank``; configs/lowrank.yaml holds the same with comments.

    Attributes:
        method: named variant of the transform.
        rank: numbers per token and layer, instead of a ratio; without either, a quarter of the source's.
        allocate: how the budget is spread over layers (and keys and values, where a method has them apart): "uniform",
            by the "spectrum" of what is dropped, or "greedy", by measured loss; "auto" is the spectrum where that
            compares layers by the loss (fisher, separate) and uniform elsewhere. Method palu has its own way.
        rank_multiple: every rank is one of it.
        window: tokens that a query reads exactly, its own included; 0: none. Counted in the bytes.
        sinks: first tokens that are read exactly too, with a window; with bits and none, whose latents stay exact.
        bits: "auto" chooses between 8, 4, 2 and none for every latent, by what it is worth, and ``kv_ratio`` is then
            the share of the bytes; method fisher with text only.
        fit_steps, fit_iterations, fit_queries: as for MLA; method fisher with text only.
    """

    method: str = "fisher"
    rank: int | None = None
    allocate: str = "auto"
    rank_multiple: int = 1
    window: int = 0
    fit_steps: int = 3
    fit_iterations: int = 8
    fit_queries: int = 256

    METHODS: ClassVar[tuple[str, ...]] = METHODS
    BITS: ClassVar[tuple[str, ...]] = ("8", "4", "2", "fp8", "auto")
    SINKS_OF_CODES: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_choice("method", self.METHODS)
        self._check_choice("allocate", ALLOCATIONS)
        super().__post_init__()
        self._check_positive("rank", "rank_multiple", "fit_iterations", "fit_queries")
        if self.rank is not None and self.kv_ratio is not None:
            raise SurgeryError("give rank or kv_ratio, not both")
        if self.window < 0 or (self.sinks and not self.window and not self.quantizes):
            raise SurgeryError(f"{self.sinks} sinks and a window of {self.window}: sinks need a window of at least 1")
        if self.bits == "auto":
            chosen = {"rank": self.rank is not None, "rank_multiple": self.rank_multiple != 1}
            chosen |= {"allocate": self.allocate not in ("auto", "spectrum"), "method": self.method != "fisher"}
            chosen |= {"keys": self.keys != "channel", "hadamard": self.hadamard}
            chosen |= {"calibration": self.calibration == NO_CALIBRATION}
            if wrong := [name for name, unlike in chosen.items() if unlike]:
                raise SurgeryError(
                    f"bits auto chooses ranks and bits by the loss, of method fisher on text, with scales by channel: "
                    f"leave {', '.join(wrong)} at the default"
                )

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        said = super().kv_cache()
        return {**said, "sinks": self.sinks} if self.sinks and not self.window else said
