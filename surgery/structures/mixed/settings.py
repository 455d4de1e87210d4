"""What a conversion to layers that differ is asked for: other conversions, each with its layers. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.structures.settings import FitSettings


@dataclass(frozen=True)
class Part:
    """One of the conversions, and the layers that are made by it.

    Attributes:
        to: its target.
        layers: numbers, from 0.
        asked: of its settings, those that are not shared by all parts.
        settings: all of them. Their budget is that of a conversion of the whole model: a layer becomes what it would
            be there.
    """

    to: str
    layers: tuple[int, ...]
    asked: Mapping[str, Any]
    settings: ConversionSettings

    def to_dict(self) -> dict[str, Any]:
        """As a file says it."""
        return {"to": self.to, "layers": list(self.layers), **self.asked}


@dataclass(frozen=True)
class MixedSettings(FitSettings):
    """Settings of a conversion whose layers differ, as ``surgery plan`` writes them."""

    kv_ratio: None = setting(None, "Follows from the parts.", section="Budget", in_file=True)
    parts: tuple[Part, ...] = setting(
        (),
        "Conversions, each with the layers that it makes: to, layers and settings.",
        more="A layer becomes what that conversion would make of it in the whole model.",
        section="Parts",
        in_file=True,
    )
    keep: tuple[int, ...] = setting((), "Layers that stay as they are.", in_file=True)

    hadamard: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_ratio is not None:
            raise SurgeryError("kv_ratio: the bytes of a mixture follow from its parts")
        count = Counter([*self.keep, *(layer for part in self.parts for layer in part.layers)])
        if twice := [layer for layer, times in count.items() if times > 1]:
            raise SurgeryError(f"parts: layer {min(twice)} is named more than once")
        if missing := set(range(len(count))) - set(count):
            raise SurgeryError(f"parts: no part and no keep names layer {min(missing)}")
        for part in self.parts:
            if getattr(part.settings, "hadamard", False):
                raise SurgeryError("parts: hadamard rotates all layers or none: leave it out")

    @property
    def layers(self) -> int:
        """How many are named."""
        return len(self.keep) + sum(len(part.layers) for part in self.parts)

    @property
    def context(self) -> int | None:
        """Tokens at which a part's ratio is counted, where one has such a number."""
        return max((found for part in self.parts if (found := getattr(part.settings, "context", None))), default=None)

    @property
    def quantizes(self) -> bool:
        """Whether the cache of some layers is quantised."""
        return any(part.settings.quantizes for part in self.parts)

    def kv_cache(self) -> list[dict[str, int | str] | None]:
        """What config.json of the own class says of every layer."""
        said: list[dict[str, int | str] | None] = [None] * self.layers
        for part in self.parts:
            if part.settings.quantizes:
                for layer in part.layers:
                    said[layer] = part.settings.kv_cache()
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain values, parts as a file says them."""
        shared = {name: value for name, value in vars(self).items() if name != "parts"}
        return {**shared, "parts": [part.to_dict() for part in self.parts]}
