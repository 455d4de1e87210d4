"""What a user can ask of a conversion to MLA. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.calibration.settings import NO_CALIBRATION
from surgery.common.errors import SurgeryError
from surgery.engines.limits import ENGINES
from surgery.structures.settings import ALLOCATIONS, StructureSettings, check_rope_bits, refuse_engine, with_formats

METHODS = ("fisher", "transmla", "mha2mla")
CARRIERS = ("auto", "stock", "own")
LATENT_NORMS = ("auto", "tiny", "constant")
FREQUENCIES = ("free", "grid")


@dataclass(frozen=True)
class ConvertSettings(StructureSettings):
    """Settings of ``surgery convert --to mla``; configs/mla.yaml holds the same with comments.

    Attributes:
        method: named variant of the transform.
        kv_lora_rank, rope_dim: the budget spelled out instead of a ratio; with one, one of them fixes the split.
        rope_frequencies: "free" lets any frequencies keep RoPE; "grid" only the highest ones, once each, so that the
            result is a default-RoPE model that every engine loads.
        freqfold: neighbouring frequencies that TransMLA takes for one; None tries several.
        allocate: "uniform" ranks, or ranks per layer by "spectrum" at the same bytes in all, which only the own class
            holds; method fisher with text only.
        carrier: "stock" deepseek_v3, the project's "own" class, or "auto": stock where it can.
        latent_norm: how a stock class's latent norm is neutralised.
        rope_bits: with bits, those of the rotated numbers, which are quantised by token: 16 leaves them as they are,
            None takes ``bits``.
        engine: write what this engine carries ("all": each of them): sizes, frequencies and norm follow from it.
        fit_steps, fit_iterations, fit_queries: Gauss-Newton steps of the least-squares fit of each layer (0: none),
            conjugate-gradient iterations in each, and query positions sampled from each sequence; method fisher only.
            Their defaults were chosen on the demo model alone.
    """

    method: str = "fisher"
    kv_lora_rank: int | None = None
    rope_dim: int | None = None
    rope_frequencies: str = "free"
    freqfold: int | None = None
    allocate: str = "uniform"
    carrier: str = "auto"
    latent_norm: str = "auto"
    rope_bits: int | str | None = None
    engine: str | None = None
    fit_steps: int = 3
    fit_iterations: int = 8
    fit_queries: int = 256

    def __post_init__(self) -> None:
        for name, allowed in (
            ("method", METHODS),
            ("carrier", CARRIERS),
            ("latent_norm", LATENT_NORMS),
            ("rope_frequencies", FREQUENCIES),
            ("allocate", ALLOCATIONS),
        ):
            self._check_choice(name, allowed)
        super().__post_init__()
        if self.quantizes:
            refuse_engine(self)
            if self.carrier == "stock":
                raise SurgeryError("bits: stock deepseek_v3 keeps a plain cache; drop --carrier stock")
            object.__setattr__(self, "carrier", "own")
        elif self.engine is not None:
            self._check_engine()
        check_rope_bits(self)
        self._check_positive("kv_lora_rank", "freqfold", "fit_iterations", "fit_queries")
        if self.rope_dim is not None and (self.rope_dim < 0 or self.rope_dim % 2):
            raise SurgeryError(f"rope_dim must be even and not negative, not {self.rope_dim}")
        if self.allocate == "spectrum" and (self.method != "fisher" or self.calibration == NO_CALIBRATION):
            raise SurgeryError("allocate spectrum compares layers by the loss: it needs method fisher and text")
        if self.calibration == NO_CALIBRATION and self.method == "transmla":
            raise SurgeryError("method transmla needs calibration text: drop --calibration none")

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        return with_formats(super().kv_cache(), rope_format=self.rope_bits)

    def _check_engine(self) -> None:
        self._check_choice("engine", ENGINES)
        for name, allowed in (("carrier", ("auto", "stock")), ("allocate", ("uniform",)), ("method", ("fisher",))):
            if getattr(self, name) not in allowed:
                raise SurgeryError(f"engine {self.engine} takes {name} {allowed[0]}, not {getattr(self, name)}")
        # Frozen; a result for an engine is a model of default RoPE, whatever else is asked for.
        object.__setattr__(self, "rope_frequencies", "grid")
