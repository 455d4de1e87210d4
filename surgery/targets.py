"""What ``--to`` can name: for each target its settings, and what converts and plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.conversion import Conversion
from surgery.convert_cache import convert_to_quantized
from surgery.convert_cross_layer import convert_cross_layer
from surgery.convert_heads import convert_to_gqa
from surgery.convert_hybrid import convert_to_hybrid
from surgery.convert_low_rank import convert_to_low_rank
from surgery.convert_mla import convert_to_mla
from surgery.dry_run import ConversionPlan, plan_conversion
from surgery.errors import SurgeryError
from surgery.file_settings import did_you_mean, read_mapping
from surgery.settings import (
    ConversionSettings,
    ConvertSettings,
    CrossLayerSettings,
    HybridSettings,
    KVHeadsSettings,
    LowRankSettings,
    QuantizedSettings,
)
from surgery.slicing import SliceSettings, slice_checkpoint


@dataclass(frozen=True)
class Target:
    """A structure that attention can be converted to.

    Attributes:
        settings_class: what can be asked of the conversion.
        convert: does it.
        plan: says what it would take; None where that is not known yet.
        fixed: settings that the name of the target stands for.
    """

    name: str
    settings_class: type[ConversionSettings]
    convert: Callable[..., Conversion]
    planner: Callable[..., ConversionPlan] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, given: Mapping[str, Any], config: Path | None = None) -> ConversionSettings:
        """Settings from a file, if there is one, and from what was given besides; None counts as not given.

        Raises:
            SurgeryError: a setting that this target does not have, or a value that it does not take.
        """
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in self.fixed.items():
            if given.get(name, value) != value:
                raise SurgeryError(f"{name} {given[name]} contradicts --to {self.name}, which means {value}")
        read = read_mapping(config) if config else {}
        where = str(config) if any(name not in given for name in read) else f"--to {self.name}"
        return self.settings_class.from_mapping({**read, **given, **self.fixed}, where)

    def plan(self, *arguments: Any, **options: Any) -> ConversionPlan:
        """A dry run.

        Raises:
            SurgeryError: there is none for this target.
        """
        if self.planner is None:
            raise SurgeryError(f"--dry-run: not known for --to {self.name}; --to mla has one")
        return self.planner(*arguments, **options)


def _convert_to_cross_layer(
    source: str | Path, out: str | Path | None, settings: CrossLayerSettings, **options: Any
) -> Conversion:
    """A cascade is low rank with latents that are read across layers; the other methods share a cache."""
    convert = convert_to_low_rank if settings.method == "cascade" else convert_cross_layer
    return convert(source, out, settings, **options)


TARGETS = {
    target.name: target
    for target in (
        Target("mla", ConvertSettings, convert_to_mla, plan_conversion),
        Target("gqa", KVHeadsSettings, convert_to_gqa),
        Target("mqa", KVHeadsSettings, convert_to_gqa, fixed={"kv_heads": 1}),
        Target("lowrank", LowRankSettings, convert_to_low_rank),
        Target("crosslayer", CrossLayerSettings, _convert_to_cross_layer),
        Target("hybrid", HybridSettings, convert_to_hybrid),
        Target("quantized", QuantizedSettings, convert_to_quantized),
    )
}


SLICE = Target("slice", SliceSettings, slice_checkpoint)
"""The verb of its own that makes a smaller checkpoint from a converted one."""


def find_target(name: str) -> Target:
    """The target of that name.

    Raises:
        SurgeryError: there is none.
    """
    if name not in TARGETS:
        known = list(TARGETS)
        raise SurgeryError(f"--to {name}: unknown target, choose {', '.join(known)}{did_you_mean(name, known)}")
    return TARGETS[name]
