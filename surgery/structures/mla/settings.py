"""Settings of a conversion to MLA. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from surgery.calibration.settings import NO_CALIBRATION
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.engines.limits import Engine
from surgery.structures.kept_layers import keep_layers
from surgery.structures.settings import (
    RowSettings,
    check_spectrum,
    refuse_changed,
)

Method = Literal["fisher", "transmla", "mha2mla"]


@dataclass(frozen=True)
class ConvertSettings(RowSettings):
    """Settings of ``surgery convert --to mla``."""

    method: Method = setting(
        "fisher",
        "How the transform is found.",
        more="fisher weighs by the loss; the others are for comparison.",
        section="Method",
        advanced=True,
    )
    kv_lora_rank: int | None = setting(
        None,
        "Rank of the latent; with the rotary dimensions in place of a ratio, or with a ratio to fix the split.",
        more="Of a source that is MLA already alone, and half of its rank unless it or a ratio is given.",
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
        "Which frequencies keep RoPE: any, or grid: default RoPE, which every engine loads.",
        more="grid: the highest ones, once each; an engine sees to it.",
        section="Method",
        advanced=True,
    )
    freqfold: int | None = setting(
        None,
        "Neighboring frequencies taken for one, in method transmla.",
        least=1,
        unset="several are tried",
        advanced=True,
    )
    allocate: Literal["auto", "uniform", "spectrum"] = setting(
        "auto",
        "Rotary dimensions and ranks of layers: uniform, or by spectrum at the same bytes in all.",
        more="Layers that differ need the custom model class, method fisher and calibration text; auto: spectrum where "
        "all three are given and no rank is.",
        section="Method",
        advanced=True,
    )
    keep_layers: str = keep_layers()
    carrier: Literal["auto", "stock", "own"] = setting(
        "auto",
        "What holds the result: stock (deepseek_v3) or own (the custom model class), both with plain values.",
        more="auto: the custom model class with bits that are chosen by the loss, where the source allows it and no "
        "setting of ranks is given; else stock where it can.",
        section="Output",
    )
    latent_norm: Literal["auto", "tiny", "constant"] = setting(
        "auto",
        "How stock's latent norm is neutralized.",
        more="tiny needs rms_norm_eps 1e-6, constant needs biases.",
        section="Output",
        advanced=True,
    )
    engine: Engine | None = setting(
        None,
        "Write what this engine, or all of them, carries: sizes, frequencies and norm follow; with --to quantized, "
        "name the engine's own cache.",
        section="Output",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is not None:
            refuse_changed(
                self._decided_by_bits(),
                "bits auto chooses components and their bits by the loss, of method fisher on text",
            )
            if self.engine is not None:
                raise SurgeryError(
                    f"bits: {self.engine} cannot read a quantized cache of ours; drop --bits and give the engine its "
                    "own cache dtype, which surgery doctor names",
                    setting="bits",
                )
            if self.carrier == "stock":
                raise SurgeryError(
                    "bits: stock deepseek_v3 keeps a plain cache; drop --carrier stock", setting="carrier"
                )
            object.__setattr__(self, "carrier", "own")
        elif self.engine is not None:
            self._check_engine()
        if self.sinks and self.bits is None:
            raise SurgeryError(
                "sinks are the first tokens that a quantized cache keeps exact: give --bits auto too", setting="sinks"
            )
        if self.allocate == "spectrum":
            if self.carrier == "stock":
                raise SurgeryError(
                    "allocate spectrum: stock deepseek_v3 has one rank for all; drop --carrier stock",
                    setting="allocate",
                )
            object.__setattr__(self, "carrier", "own")
        if self.rope_dim is not None and self.rope_dim % 2:
            raise SurgeryError(f"rope_dim must be even and not negative, not {self.rope_dim}", setting="rope_dim")
        check_spectrum(self)
        if self.calibration == NO_CALIBRATION and self.method == "transmla":
            raise SurgeryError("method transmla needs calibration text: drop --calibration none", setting="method")

    @property
    def spreads(self) -> bool:
        """Whether one budget is allocated over layers, whose sizes may then differ, if the target class allows it."""
        if self.allocate == "auto":
            compares = self.method == "fisher" and self.calibration != NO_CALIBRATION
            return compares and self.kv_lora_rank is None and self.rope_frequencies == "free"
        return self.allocate == "spectrum"

    @property
    def is_open(self) -> bool:
        """Whether no setting fixes the form of the result, so that packed rows are used if the source allows them."""
        is_fixed = (
            self.bits is not None or self.engine is not None or self.carrier != "auto" or self.latent_norm != "auto"
        )
        return not is_fixed and not any(self._decided_by_bits().values())

    def _decided_by_bits(self) -> dict[str, bool]:
        """Return, for each setting that conflicts with automatic bits, whether it differs from its default."""
        defaults = {field.name: field.default for field in fields(self)}
        names = "method", "kv_lora_rank", "rope_dim", "rope_frequencies", "freqfold"
        changed = {name: getattr(self, name) != defaults[name] for name in names}
        return changed | {
            "allocate": self.allocate == "uniform",
            "calibration": self.calibration == NO_CALIBRATION,
        }

    def _check_engine(self) -> None:
        for name, allowed in (
            ("carrier", ("auto", "stock")),
            ("allocate", ("auto", "uniform")),
            ("method", ("fisher",)),
            ("latent_norm", ("auto", "tiny")),  # the constant is a bias, which engines drop
        ):
            if getattr(self, name) not in allowed:
                raise SurgeryError(
                    f"engine {self.engine} takes {name} {allowed[0]}, not {getattr(self, name)}", setting="engine"
                )
        # The dataclass is frozen. Engines load default RoPE only, which overrides the setting.
        object.__setattr__(self, "rope_frequencies", "grid")
