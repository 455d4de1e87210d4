"""What a user can ask of a conversion to fewer KV heads. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.calibration.settings import NO_CALIBRATION
from surgery.common.errors import SurgeryError
from surgery.engines.limits import ENGINES
from surgery.structures.settings import ALLOCATIONS, StructureSettings, refuse_engine

METHODS = ("fisher", "kv-heads", "procrustes", "mean-pool", "key-norm")
CARRIERS = ("auto", "own", "decilm")


@dataclass(frozen=True)
class KVHeadsSettings(StructureSettings):
    """Settings of ``surgery convert --to gqa``; configs/gqa.yaml holds the same with comments.

    Attributes:
        method: named variant of the transform.
        kv_heads: KV heads to keep in every layer, instead of a ratio; without either, half of the source's.
        allocate: "uniform", or by "spectrum": numbers of heads by layer whose predicted errors are least in all, where
            kv_heads or the ratio is the average; method fisher with text only.
        carrier: "own": the project's class; "decilm": DeciLM, whose layers may differ too (Llama only); "auto": the
            source's family if all layers keep the same number of heads, otherwise own.
        engine: refuse what this engine ("all": each of them) does not carry; layers that differ become DeciLM's.
        fit_steps, fit_iterations, fit_queries: as for MLA; method fisher with text only.
    """

    method: str = "fisher"
    kv_heads: int | None = None
    allocate: str = "uniform"
    carrier: str = "auto"
    engine: str | None = None
    fit_steps: int = 3
    fit_iterations: int = 8
    fit_queries: int = 256

    def __post_init__(self) -> None:
        self._check_choice("method", METHODS)
        self._check_choice("allocate", ALLOCATIONS)
        self._check_choice("carrier", CARRIERS)
        super().__post_init__()
        self._check_positive("kv_heads", "fit_iterations", "fit_queries")
        if self.kv_heads is not None and self.kv_ratio is not None:
            raise SurgeryError("give kv_heads or kv_ratio, not both")
        if self.allocate == "spectrum" and (self.method != "fisher" or self.calibration == NO_CALIBRATION):
            raise SurgeryError("allocate spectrum compares layers by the loss: it needs method fisher and text")
        if self.quantizes:
            refuse_engine(self)
        if self.quantizes and self.carrier == "decilm":
            raise SurgeryError("bits: DeciLM keeps a plain cache; drop --carrier decilm")
        if self.method == "key-norm" and self.carrier != "auto":
            raise SurgeryError("method key-norm is written in the source's family: leave carrier auto")
        if self.engine is not None:
            self._check_choice("engine", ENGINES)
            if self.carrier == "own":
                raise SurgeryError(f"engine {self.engine} knows no own class: leave carrier auto")
