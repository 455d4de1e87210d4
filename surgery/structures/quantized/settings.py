"""Settings of a quantized cache. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.engines.cache_formats import cache_dtype_flags
from surgery.structures.kept_layers import keep_layers
from surgery.structures.settings import RowSettings


@dataclass(frozen=True)
class QuantizedSettings(RowSettings):
    """Settings of ``surgery convert --to quantized``."""

    bits: Literal["auto", 8, 4, 2] = setting(
        "auto",
        "Bits per cached value.",
        more="auto allocates bits by channel within the byte budget of the ratio; a number applies to all channels.",
        section="Bits",
    )
    kv_ratio: float | None = setting(None, unset="0.25 with bits auto", section="Budget")
    sinks: int | None = setting(None, unset="4", least=0, section="Bits")
    keep_layers: str = keep_layers()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_text("quantized")
        if self.bits != "auto" and self.kv_ratio is not None:
            raise SurgeryError(
                f"kv_ratio: bits {self.bits} determines the bytes; drop kv_ratio, or use --bits auto",
                setting="kv_ratio",
            )

    @classmethod
    def better_alternative(cls, option: Callable[[str], str | None]) -> str | None:
        """Return the flags with which an engine quantizes its plain cache itself; None if no engine is given."""
        if (engine := option("engine")) is None:
            return None
        if (ratio := option("kv_ratio")) is not None:
            weighed = f"surgery plan CKPT --kv-ratio {ratio} --engine {engine} --allow engine weighs its formats"
            return f"no conversion needed: {engine} quantizes its cache itself; {weighed}"
        bits = option("bits")
        bits = "4" if bits in (None, "auto") else bits
        flags = cache_dtype_flags(engine, int(bits) if bits.isdigit() else bits)
        return f"no conversion needed: {engine} quantizes its cache itself with {flags}"

    def ending(self, target: str) -> str:
        """Return the ending of the default output name, with uniform bits."""
        return target if self.bits == "auto" else f"{target}-int{self.bits}"
