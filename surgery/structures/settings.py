"""Settings of conversions whose result may keep a quantised cache of a few bits. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from surgery.calibration.settings import NO_CALIBRATION, ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting

Bits = Literal[8, 4, 3, 2, "fp8"]
RopeBits = Literal[16, 8, 4, 3, 2, "fp8"]
Allocation = Literal["uniform", "spectrum"]

FIRST_TOKENS = 4
"""Full-precision tokens at the start of a text where bits are chosen: attention sinks want more bits than others."""


def keep_quantised() -> Any:
    """The setting of what a quantised source can stay in part."""
    return setting(
        False,
        "Leave quantised weights outside of attention as they are stored.",
        more="Of compressed-tensors, bitsandbytes and fp8 by blocks; otherwise all are dequantised.",
        section="Output",
        advanced=True,
    )


@dataclass(frozen=True)
class StructureSettings(ConversionSettings):
    """Base settings of conversions whose result may keep a quantised cache of a few bits."""

    bits: Bits | None = setting(
        None,
        "Bits of a cached number; a ratio then counts numbers, so the bytes are less by these bits.",
        section="Bits",
        unset="those of the weights",
    )
    group: int | None = setting(
        None,
        "Numbers that share a scale, with bits.",
        more="Tokens in a channel of the keys, channels in a token of values and latents.",
        unset="32",
        least=1,
        advanced=True,
    )
    keys: Literal["channel", "token"] = setting(
        "channel",
        "What shares a scale of keys or latents, with bits: the tokens of a channel, or the channels of a token.",
        advanced=True,
    )
    hadamard: bool = setting(False, "Fold a rotation into the weights that spreads outliers, with bits.", advanced=True)
    sinks: int | None = setting(0, "First tokens that stay exact in a quantised cache.", least=0, advanced=True)
    keep_quantised: bool = keep_quantised()

    SINKS_OF_CODES: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits == "auto":
            refuse_changed(
                {"group": self.group is not None, "keys": self.keys != "channel", "hadamard": self.hadamard},
                "bits auto keeps a row of fixed bytes a token, without scales of groups",
            )
            return
        if self.group is None:
            object.__setattr__(self, "group", 32)
        if self.bits is None:
            if (self.group, self.keys, self.hadamard) != (32, "channel", False):
                raise SurgeryError("group, keys and hadamard are of a quantised cache: give bits too", setting="group")
            if self.sinks and self.SINKS_OF_CODES:
                raise SurgeryError(
                    "sinks are the first tokens that a quantised cache keeps exact: give bits too", setting="sinks"
                )
            return
        packed = {"fp8": 1, 8: 1, 4: 2, 2: 4}.get(self.bits, 8)
        if self.group % packed:
            raise SurgeryError(
                f"group {self.group} of {self.bits} bits fills no whole bytes: choose a multiple of {packed}",
                setting="group",
            )

    @property
    def quantizes(self) -> bool:
        """Return whether the result keeps a cache quantized in groups of tokens."""
        return self.bits not in (None, "auto")

    @property
    def first_tokens(self) -> int:
        """First tokens that a cache of packed rows keeps in full precision."""
        return FIRST_TOKENS if self.sinks is None else self.sinks

    @property
    def format(self) -> str:
        """Return the format of a quantised value, by its name in the cache layers."""
        return cache_format(self.bits)

    def ending(self, target: str) -> str:
        """Return the ending of the output's default name, with the bits."""
        if self.bits == "auto":
            return f"{target}-bits"
        return f"{target}-{self.format}" if self.quantizes else target

    def kv_cache(self) -> dict[str, int | str]:
        """Return the ``kv_cache`` entry of the custom model class's config.json."""
        entry = {"format": self.format, "group": self.group, "window": 0, "keys": self.keys}
        return {**entry, "sinks": self.sinks} if self.sinks and self.SINKS_OF_CODES else entry


def check_spectrum(settings: StructureSettings) -> None:
    """Raises SurgeryError where ranks by spectrum are asked for and nothing compares layers."""
    if settings.allocate == "spectrum" and (settings.method != "fisher" or settings.calibration == NO_CALIBRATION):
        raise SurgeryError(
            "allocate spectrum compares layers by the loss: it needs method fisher and text", setting="allocate"
        )


def auto_sinks(elsewhere: str = "") -> Any:
    """The setting of first tokens of targets whose bits may be chosen; ``elsewhere`` says where else they are."""
    return setting(
        None,
        f"First tokens that stay in full precision in a quantised cache{elsewhere}.",
        least=0,
        section="Bits",
        unset="4 where bits are auto, else 0",
        advanced=True,
    )


def rope_bits() -> Any:
    """The setting of targets whose cache may hold rotary dimensions apart."""
    return setting(
        None,
        "Bits of the rotary dimensions of a quantised MLA cache, by token; 16 leaves them unquantised.",
        section="Bits",
        unset="as bits",
        advanced=True,
    )


def streaming_bits() -> Any:
    """The setting of targets that may have streaming heads."""
    return setting(
        None,
        "Bits of what streaming heads keep, where a hybrid model is quantised.",
        section="Bits",
        unset="as bits",
        advanced=True,
    )


def check_more_bits(settings: StructureSettings, *names: str) -> None:
    """Raises SurgeryError where bits of a part of the cache are given and the cache is not quantised."""
    for name in names:
        if getattr(settings, name) is not None and not settings.quantizes:
            raise SurgeryError(f"{name} are of a quantised cache: give bits too")


def refuse_changed(changed: Mapping[str, bool], reason: str) -> None:
    """Raises SurgeryError where settings that others decide are not at their default.

    Args:
        changed: by name.
        reason: says what decides them.
    """
    if names := [name for name, is_changed in changed.items() if is_changed]:
        raise SurgeryError(f"{reason}: leave {', '.join(names)} at the default", setting=names[0])


def refuse_engine(settings: StructureSettings) -> None:
    """Raises SurgeryError where an engine is asked for: none reads a quantised cache of this package."""
    if settings.engine is not None:
        raise SurgeryError(
            f"bits: {settings.engine} cannot read a quantised cache of ours; drop --bits and give the engine its own "
            "cache dtype, which surgery doctor names",
            setting="bits",
        )


def with_formats(kv_cache: dict[str, int | str], **bits: int | str | None) -> dict[str, int | str]:
    """``kv_cache`` of a config.json with formats of further parts, by name; those that are None are left out."""
    return kv_cache | {name: cache_format(each) for name, each in bits.items() if each is not None}


def cache_format(bits: int | str) -> str:
    """Return the cache layers' name of a format."""
    return {"fp8": "fp8", "16": "exact"}.get(str(bits), f"int{bits}")
