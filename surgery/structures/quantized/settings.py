"""Settings of a quantised cache. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.engines.cache_formats import cache_dtype_flags
from surgery.structures.settings import Bits, RopeBits, StructureSettings, rope_bits, streaming_bits, with_formats


@dataclass(frozen=True)
class QuantizedSettings(StructureSettings):
    """Settings of ``surgery convert --to quantized``. Text serves to measure the loss only; nothing is calibrated."""

    bits: Bits = setting(
        4, "Bits of a cached number.", more="Scales are counted in the bytes on top. fp8 is e4m3.", section="Bits"
    )
    kv_ratio: None = setting(None, "Follows from bits, group and window.", section="Budget", in_file=True)
    window: int = setting(
        0, "Recent tokens that stay exact.", more="At least; KIVI keeps 128.", least=0, section="Budget"
    )
    streaming_bits: Bits | None = streaming_bits()
    rope_bits: RopeBits | None = rope_bits()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_ratio is not None:
            raise SurgeryError(
                "kv_ratio: the bytes of a quantised cache follow from bits, group and window", setting="kv_ratio"
            )

    @classmethod
    def needless(cls, option: Callable[[str], str | None]) -> str | None:
        """Engines quantise plain caches by themselves; one of ours would load in none of them."""
        if (engine := option("engine")) is None:
            return None
        bits = option("bits") or "4"
        flags = cache_dtype_flags(engine, int(bits) if bits.isdigit() else bits)
        return f"nothing to convert, {engine} quantises its cache itself: {flags}"

    def ending(self, target: str) -> str:
        """The target's own name says it."""
        return target

    def kv_cache(self) -> dict[str, int | str]:
        """Return the ``kv_cache`` entry of the custom model class's config.json."""
        entry = {**super().kv_cache(), "window": self.window}
        return with_formats(entry, streaming_format=self.streaming_bits, rope_format=self.rope_bits)
