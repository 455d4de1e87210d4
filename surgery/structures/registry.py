"""What ``--to`` can name: for each target its settings, and what converts and plans. Needs no torch before it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.calibration.settings import ConversionSettings
from surgery.checkpoint.location import find_local
from surgery.checkpoint.output_place import settle_output
from surgery.common.errors import SurgeryError
from surgery.common.file_settings import did_you_mean, read_mapping
from surgery.common.setting import names_of
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.structures.slices.settings import SliceSettings

if TYPE_CHECKING:
    from surgery.structures.converter import Conversion
    from surgery.structures.mla.dry_run import ConversionPlan


@dataclass(frozen=True)
class Target:
    """A structure that attention can be converted to.

    Attributes:
        settings_class: what can be asked of the conversion.
        convert: does it.
        planner: says what it would take; None where that is not known yet.
        fixed: settings that the name of the target stands for.
        ending: of the default name of the output, but for what the settings add; the target's name if it is empty.
    """

    name: str
    settings_class: type[ConversionSettings]
    convert: Callable[..., Conversion]
    planner: Callable[..., ConversionPlan] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ending: str = ""

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
        for name in {**read, **given}:
            others = targets_with(name)
            if others and name not in names_of(self.settings_class):
                raise SurgeryError(f"{where}: {name} is for {', '.join(others)}; {self.name} has no such setting")
        return self.settings_class.from_mapping({**read, **given, **self.fixed}, where)

    def check_places(self, source: str, out: Path | None, settings: ConversionSettings, *, overwrite: bool) -> None:
        """What a conversion would refuse of its source and output at first sight, before torch is loaded for it.

        Raises:
            SurgeryError: there is no such checkpoint, or the output is there already or is the source.
        """
        one_head = getattr(settings, "kv_heads", None) == 1
        ending = (self.ending or ("mqa" if one_head else self.name)) + getattr(settings, "suffix", "")
        settle_output(source, find_local(source), out, ending, overwrite=overwrite)

    def plan(self, *arguments: Any, **options: Any) -> ConversionPlan:
        """A dry run.

        Raises:
            SurgeryError: there is none for this target.
        """
        if self.planner is None:
            raise SurgeryError(f"--dry-run: not known for --to {self.name}; --to mla has one")
        return self.planner(*arguments, **options)


def _imported(module: str, name: str) -> Callable[..., Any]:
    """A function that imports itself when it is called."""
    return lambda *arguments, **options: getattr(import_module(f"surgery.structures.{module}"), name)(
        *arguments, **options
    )


_convert_to_low_rank = _imported("low_rank.convert", "convert_to_low_rank")
_convert_cross_layer = _imported("cross_layer.convert", "convert_cross_layer")


def _convert_to_cross_layer(
    source: str | Path, out: str | Path | None, settings: CrossLayerSettings, **options: Any
) -> Conversion:
    """A cascade is low rank with latents that are read across layers; the other methods share a cache."""
    convert = _convert_to_low_rank if settings.method == "cascade" else _convert_cross_layer
    return convert(source, out, settings, **options)


_convert_to_gqa = _imported("kv_heads.convert", "convert_to_gqa")

TARGETS = {
    target.name: target
    for target in (
        Target(
            "mla",
            ConvertSettings,
            _imported("mla.convert", "convert_to_mla"),
            _imported("mla.dry_run", "plan_conversion"),
        ),
        Target("gqa", KVHeadsSettings, _convert_to_gqa),
        Target("mqa", KVHeadsSettings, _convert_to_gqa, fixed={"kv_heads": 1}),
        Target("lowrank", LowRankSettings, _convert_to_low_rank),
        Target("crosslayer", CrossLayerSettings, _convert_to_cross_layer),
        Target("hybrid", HybridSettings, _imported("hybrid.convert", "convert_to_hybrid")),
        Target("quantized", QuantizedSettings, _imported("quantized.convert", "convert_to_quantized")),
    )
}


SLICE = Target("slice", SliceSettings, _imported("slices.convert", "slice_checkpoint"), ending="sliced")
"""The verb of its own that makes a smaller checkpoint from a converted one."""


def targets_with(setting: str) -> list[str]:
    """Targets that have a setting."""
    return [name for name, each in TARGETS.items() if not each.fixed and setting in names_of(each.settings_class)]


def find_target(name: str) -> Target:
    """The target of that name.

    Raises:
        SurgeryError: there is none.
    """
    if name not in TARGETS:
        known = list(TARGETS)
        raise SurgeryError(f"--to {name}: unknown target, choose {', '.join(known)}{did_you_mean(name, known)}")
    return TARGETS[name]
