"""What a user can ask of conversions whose result may keep its cache as codes of a few bits. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError

ALLOCATIONS = ("uniform", "spectrum")


@dataclass(frozen=True)
class StructureSettings(ConversionSettings):
    """What conversions can be asked for whose result may keep its cache as codes of a few bits.

    Attributes:
        bits: of a cached number: 8, 4, 2, or "fp8" (e4m3); None: those of the weights. ``kv_ratio`` and what else fixes
            the structure count numbers, so the bytes are less by these bits.
        sinks: first tokens that stay exact.
        group, keys, hadamard: as for ``--to quantized``, :class:`QuantizedSettings`; with bits only. A group of None is
            32, and 64 where bits are "auto", whose scales would otherwise take as much as many of the codes.
    """

    bits: int | str | None = None
    group: int | None = None
    keys: str = "channel"
    hadamard: bool = False
    sinks: int | None = 0

    BITS: ClassVar[tuple[str, ...]] = ("8", "4", "2", "fp8")
    SINKS_OF_CODES: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is None:
            object.__setattr__(self, "group", 64 if self.bits == "auto" else 32)
        self._check_choice("keys", ("channel", "token"))
        self._check_positive("group")
        if self.sinks is not None and self.sinks < 0:
            raise SurgeryError(f"sinks must be at least 0, not {self.sinks}")
        if self.bits is None:
            if (self.group, self.keys, self.hadamard) != (32, "channel", False):
                raise SurgeryError("group, keys and hadamard are of a quantised cache: give bits too")
            if self.sinks and self.SINKS_OF_CODES:
                raise SurgeryError("sinks are the first tokens that a quantised cache keeps exact: give bits too")
            return
        self._check_bits("bits")
        least = {"fp8": 1, "8": 1, "4": 2}.get(str(self.bits), 4)
        if self.group % least:
            raise SurgeryError(f"group {self.group} of {self.bits} bits fills no whole bytes: choose a multiple of 4")

    def _check_bits(self, name: str, *more: str) -> None:
        allowed = (*(self.BITS if name == "bits" else StructureSettings.BITS), *more)
        if str(getattr(self, name)) not in allowed:
            raise SurgeryError(f"{name} {getattr(self, name)!r}: choose {', '.join(allowed[:-1])} or {allowed[-1]}")

    @property
    def quantizes(self) -> bool:
        """Whether the result keeps its cache as codes."""
        return self.bits is not None

    @property
    def format(self) -> str:
        """Of a code, as the cache layers call it."""
        return cache_format(self.bits)

    @property
    def suffix(self) -> str:
        """What bits add to the default name of the output."""
        if not self.quantizes:
            return ""
        return "-mixed" if self.bits == "auto" else f"-{self.format}"

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        said = {"format": self.format, "group": self.group, "window": 0, "keys": self.keys}
        return {**said, "sinks": self.sinks} if self.sinks and self.SINKS_OF_CODES else said


def refuse_engine(settings: StructureSettings) -> None:
    if settings.engine is not None:
        raise SurgeryError(
            f"bits: {settings.engine} cannot read a quantised cache of ours; drop --bits and give the engine its own "
            "cache dtype, which surgery doctor names"
        )


def check_rope_bits(settings: StructureSettings) -> None:
    if settings.rope_bits is not None:
        settings._check_bits("rope_bits", "16")
        if not settings.quantizes:
            raise SurgeryError("rope_bits are of a quantised cache: give bits too")


def with_formats(kv_cache: dict[str, int | str], **bits: int | str | None) -> dict[str, int | str]:
    return kv_cache | {name: cache_format(each) for name, each in bits.items() if each is not None}


def cache_format(bits: int | str) -> str:
    """What the cache layers call it; where formats are chosen by latent, that of all others."""
    return {"fp8": "fp8", "auto": "int4", "16": "exact"}.get(str(bits), f"int{bits}")
