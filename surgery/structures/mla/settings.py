"""Settings of a conversion to MLA. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from surgery.calibration.settings import NO_CALIBRATION
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.engines.limits import Engine
from surgery.structures.kept_layers import keep_layers
from surgery.structures.settings import RowSettings, refuse_changed

Method = Literal["fisher", "transmla", "mha2mla"]


@dataclass(frozen=True)
class ConvertSettings(RowSettings):
    """Settings of ``surgery convert --to mla``."""

    method: Method = setting(
        "fisher",
        "Conversion method.",
        more="fisher weights errors by the loss; the others are for comparison.",
        section="Method",
        advanced=True,
    )
    kv_lora_rank: int | None = setting(
        None,
        "Rank of the latent: with rope_dim instead of a ratio, or with a ratio to fix the split.",
        more="For an MLA source without rope_dim; by default half of its rank.",
        least=1,
        section="Budget",
    )
    rope_dim: int | None = setting(
        None,
        "Rotary dimensions per token.",
        least=0,
        none="auto",
        unset="several splits are tried on held-out text",
        metavar="N|auto",
        also=("--qk-rope-head-dim",),
    )
    rope_frequencies: Literal["free", "grid"] = setting(
        "free",
        "Frequencies that keep RoPE: free (any) or grid (default RoPE, which every engine loads).",
        more="grid: the highest frequencies, once each; set by engine.",
        section="Method",
        advanced=True,
    )
    freqfold: int | None = setting(
        None, "Neighboring frequencies that method transmla merges.", least=1, unset="several are tried", advanced=True
    )
    allocate: Literal["auto", "uniform", "spectrum"] = setting(
        "auto",
        "Allocation of rotary dimensions and ranks to layers: uniform, or by spectrum at the same total bytes.",
        more="spectrum requires the custom model class, method fisher and calibration text. auto: spectrum if these "
        "are given and no rank is set.",
        section="Method",
        advanced=True,
    )
    predict_values: bool | None = setting(
        None,
        "Predict the values of a token from its quantized keys, and store only the rest (bits auto).",
        more="Lowers the loss at few bits. Decoding computes up to 1.5 times as much.",
        unset="below a fifth of the bytes",
        section="Bits",
        advanced=True,
    )
    keep_layers: str = keep_layers()
    bits: Literal["auto"] | None = setting(
        None, section="Bits", unset="auto, unless a rank, a carrier, an engine or another method is given"
    )
    carrier: Literal["auto", "stock", "own"] = setting(
        "auto",
        "Target class: stock (deepseek_v3) or own (the custom model class), both unquantized.",
        more="auto: the custom model class with packed rows if the source supports it and no rank is set; otherwise "
        "stock if possible.",
        section="Output",
    )
    engine: Engine | None = setting(
        None,
        "Engine that must load the result, or all; sets sizes, frequencies and norm. With --to quantized, prints the "
        "engine's own cache option.",
        section="Output",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is not None:
            refuse_changed(
                self._decided_by_bits(), "bits auto requires method fisher, calibration text and its own allocation"
            )
            if self.engine is not None:
                raise SurgeryError(
                    f"bits: --engine {self.engine} writes a stock class, which has none; drop --bits, or drop --engine "
                    "(vLLM reads bits with our plugin)",
                    setting="bits",
                )
            if self.carrier == "stock":
                raise SurgeryError(
                    "bits: stock deepseek_v3 has no quantized cache; drop --carrier stock", setting="carrier"
                )
            object.__setattr__(self, "carrier", "own")
        elif self.engine is not None:
            self._check_engine()
        if self.sinks and self.bits is None:
            raise SurgeryError("sinks need a quantized cache: pass --bits auto too", setting="sinks")
        if self.predict_values is not None and self.bits is None and not self.is_open:
            raise SurgeryError(
                "predict_values is for caches in bits: pass --bits auto, or drop it", setting="predict_values"
            )
        if self.allocate == "spectrum":
            if self.carrier == "stock":
                raise SurgeryError(
                    "allocate spectrum: stock deepseek_v3 has one rank for all layers; drop --carrier stock",
                    setting="allocate",
                )
            object.__setattr__(self, "carrier", "own")
        if self.rope_dim is not None and self.rope_dim % 2:
            raise SurgeryError(f"rope_dim must be even and not negative, not {self.rope_dim}", setting="rope_dim")
        if self.allocate == "spectrum" and (self.method != "fisher" or self.calibration == NO_CALIBRATION):
            raise SurgeryError("allocate spectrum requires method fisher and calibration text", setting="allocate")
        if self.calibration == NO_CALIBRATION and self.method == "transmla":
            raise SurgeryError("method transmla needs calibration text: drop --calibration none", setting="method")

    @property
    def spreads(self) -> bool:
        """True if one budget is allocated over layers, whose sizes may then differ, if the target class allows it."""
        if self.allocate == "auto":
            compares = self.method == "fisher" and self.calibration != NO_CALIBRATION
            return compares and self.kv_lora_rank is None and self.rope_frequencies == "free"
        return self.allocate == "spectrum"

    @property
    def is_open(self) -> bool:
        """True if no setting fixes the form of the result, so that packed rows are used if the source allows them."""
        is_fixed = self.bits is not None or self.engine is not None or self.carrier != "auto"
        return not is_fixed and not any(self._decided_by_bits().values())

    def _decided_by_bits(self) -> dict[str, bool]:
        """Return, for each setting that conflicts with automatic bits, whether it differs from its default."""
        defaults = {field.name: field.default for field in fields(self)}
        names = "method", "kv_lora_rank", "rope_dim", "rope_frequencies", "freqfold"
        changed = {name: getattr(self, name) != defaults[name] for name in names}
        return changed | {"allocate": self.allocate == "uniform", "calibration": self.calibration == NO_CALIBRATION}

    def _check_engine(self) -> None:
        for name, allowed in (
            ("allocate", ("auto", "uniform")),
            ("method", ("fisher",)),
        ):
            if getattr(self, name) not in allowed:
                raise SurgeryError(
                    f"engine {self.engine} requires {name} {allowed[0]}, not {getattr(self, name)}", setting="engine"
                )
        if self.carrier == "own":
            raise SurgeryError(
                f"engine {self.engine} reads stock classes; drop --engine, or --carrier own", setting="engine"
            )
        # The dataclass is frozen. Engines load stock classes and default RoPE only, which overrides the settings.
        object.__setattr__(self, "carrier", "stock")
        object.__setattr__(self, "rope_frequencies", "grid")
