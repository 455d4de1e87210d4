"""Registry of the targets of ``--to``, with their settings and structures. Imports torch only to convert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.calibration.settings import ConversionSettings
from surgery.checkpoint.location import find_local
from surgery.checkpoint.output_path import settle_output
from surgery.common.errors import SurgeryError
from surgery.common.file_settings import did_you_mean, read_mapping
from surgery.common.plugins import Registry, load
from surgery.common.removed import removal
from surgery.common.setting import names_of
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.structures.slices.settings import SliceSettings

if TYPE_CHECKING:
    from surgery.structures.base import Structure


@dataclass(frozen=True)
class Target:
    """Target of a conversion.

    Attributes:
        home: import path ``module:name`` of its :class:`surgery.structures.base.Structure`.
        fixed: settings that the name of the target implies.
        called: description of the converted attention; ``about`` explains the name in the help of ``--to``.
        ending: ending of the default output name, to which settings may add; the target's name if empty.
        methods: import path ``module:name`` of the registry of its methods, to which plugins add.
    """

    name: str
    settings_class: type[ConversionSettings]
    home: str
    called: str
    about: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ending: str = ""
    methods: str = ""

    def structure(self) -> type[Structure]:
        """Import the structure class."""
        return load(self.home)

    def settings(self, values: Mapping[str, Any], config: Path | None = None) -> ConversionSettings:
        """Build the settings from a file, if any, and from explicit values, which take precedence unless None.

        Raises SurgeryError: a setting that this target does not have, or an invalid value.
        """
        values = {name: value for name, value in values.items() if value is not None}
        for name, value in self.fixed.items():
            if values.get(name, value) != value:
                raise SurgeryError(f"{name} {values[name]} conflicts with --to {self.name}, which sets {value}")
        read = read_mapping(config) if config else {}
        where = str(config) if any(name not in values for name in read) else f"--to {self.name}"
        for name in {**read, **values}:
            others = targets_with(name)
            if others and name not in names_of(self.settings_class):
                notice = removal(f"{self.name} {name}")
                reason = notice or f"is for {', '.join(others)}; {self.name} has no such setting"
                raise SurgeryError(f"{where}: {name} {reason}", setting=name, hint=notice)
        return self.settings_class.from_mapping({**read, **values, **self.fixed}, where)

    def ending_of(self, settings: ConversionSettings) -> str:
        """Return the ending of the default output name."""
        return settings.ending(self.ending or self.name)

    def check_paths(self, source: str, out: Path | None, settings: ConversionSettings, *, overwrite: bool) -> Path:
        """Check source and output without importing torch, and return the output path.

        Raises SurgeryError: there is no such checkpoint, or the output exists already or is the source.
        """
        return settle_output(source, find_local(source), out, self.ending_of(settings), overwrite=overwrite)


TARGETS: Registry[Target] = Registry(
    "structures",
    {
        target.name: target
        for target in (
            Target("mla", ConvertSettings, "surgery.structures.mla.structure:MLA", "multi-head latent attention (MLA)"),
            Target(
                "gqa",
                KVHeadsSettings,
                "surgery.structures.kv_heads.structure:KVHeads",
                "grouped-query attention with fewer KV heads (GQA)",
                "fewer KV heads, in the source's own class",
                methods="surgery.transforms.kv_heads:METHODS",
            ),
            Target(
                "mqa",
                KVHeadsSettings,
                "surgery.structures.kv_heads.structure:KVHeads",
                "multi-query attention (MQA)",
                "one KV head",
                fixed={"kv_heads": 1},
            ),
            Target(
                "lowrank",
                LowRankSettings,
                "surgery.structures.low_rank.structure:LowRank",
                "low-rank keys and values",
                methods="surgery.transforms.low_rank_methods:METHODS",
            ),
            Target(
                "crosslayer",
                CrossLayerSettings,
                "surgery.structures.cross_layer.structure:Cascade",
                "quantized latents that later layers read too",
            ),
            Target(
                "hybrid",
                HybridSettings,
                "surgery.structures.hybrid.structure:Hybrid",
                "full heads next to streaming ones, which keep first and recent tokens only",
                "streaming heads",
            ),
            Target(
                "quantized",
                QuantizedSettings,
                "surgery.structures.quantized.structure:Quantized",
                "attention over a quantized KV cache",
            ),
        )
    },
    Target,
)
"""Targets of ``--to``, including those of installed plugins."""

DEFAULT = "mla"
"""Default target."""

SLICE = Target("slice", SliceSettings, "surgery.structures.slices.structure:Slice", "fewer latents", ending="sliced")
"""Target of `surgery slice`, which makes a smaller checkpoint from a converted one; not a target of ``--to``."""


def target_of(settings: ConversionSettings) -> Target:
    """Return the target of a settings object."""
    return next(target for target in (*TARGETS.working().values(), SLICE) if type(settings) is target.settings_class)


def targets_with(setting: str) -> list[str]:
    """Return the names of the targets with a setting."""
    targets = {name: each for name, each in TARGETS.working().items() if not each.fixed}
    return [name for name, each in targets.items() if setting in names_of(each.settings_class)]


def find_target(name: str) -> Target:
    """Look up a target by name. Raises SurgeryError: the name is unknown."""
    if name not in TARGETS:
        if notice := removal(f"to {name}"):
            raise SurgeryError(f"--to {name} {notice}")
        choices = list(TARGETS)
        raise SurgeryError(f"--to {name}: unknown target, choose {', '.join(choices)}{did_you_mean(name, choices)}")
    return TARGETS[name]


def described() -> str:
    """List all targets with their explanations, for the help of ``--to``."""
    return ", ".join(f"{name} ({target.about})" if target.about else name for name, target in TARGETS.working().items())
