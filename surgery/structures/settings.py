"""Settings that several conversions share. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surgery.calibration.settings import NO_CALIBRATION, ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting

FIRST_TOKENS = 4
"""Default number of full-precision first tokens of packed rows: attention sinks need more bits than other tokens."""


def first_tokens_setting(elsewhere: str = "") -> Any:
    """Create the setting of full-precision first tokens; ``elsewhere`` names other caches that have them."""
    return setting(
        None,
        f"Number of first tokens kept in full precision in a quantized cache{elsewhere}.",
        least=0,
        section="Bits",
        unset="4 with bits auto, else 0",
        advanced=True,
    )


@dataclass(frozen=True)
class RowSettings(ConversionSettings):
    """Base settings of conversions whose result may keep a cache of packed rows."""

    bits: Literal["auto"] | None = setting(
        None,
        "auto allocates bits to each cached channel by its effect on the loss; every token has the same bytes, which "
        "the ratio counts.",
        section="Bits",
        unset="those of the weights",
    )
    sinks: int | None = first_tokens_setting()

    @property
    def first_tokens(self) -> int:
        """Number of first tokens that a cache of packed rows keeps in full precision."""
        return FIRST_TOKENS if self.sinks is None else self.sinks

    def require_text(self, target: str) -> None:
        """Raise SurgeryError if there is no calibration text, from which packed rows take bits and steps."""
        if self.calibration == NO_CALIBRATION:
            raise SurgeryError(
                f"--to {target} requires calibration text: drop --calibration none", setting="calibration"
            )

    def ending(self, target: str) -> str:
        """Return the ending of the default output name, with "-bits" for packed rows."""
        return f"{target}-bits" if self.bits == "auto" else target


def refuse_changed(changed: Mapping[str, bool], reason: str) -> None:
    """Raise SurgeryError if settings, by name, are changed although ``reason`` overrides them."""
    if names := [name for name, is_changed in changed.items() if is_changed]:
        raise SurgeryError(f"{reason}: leave {', '.join(names)} at the default", setting=names[0])
