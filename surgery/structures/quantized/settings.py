"""What a user can ask of a quantised cache. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.common.errors import SurgeryError
from surgery.structures.settings import StructureSettings, check_rope_bits, with_formats


@dataclass(frozen=True)
class QuantizedSettings(StructureSettings):
    """Settings of ``surgery convert --to quantized``; configs/quantized.yaml holds the same with comments.

    Calibration text serves to measure the loss only; nothing is fitted.

    Attributes:
        bits: of a cached number: 8, 4, 2, or "fp8" (e4m3).
        group: tokens that share a scale in a channel of the keys, channels that do in a token of values and latents.
        window: of the most recent tokens, how many stay exact at least.
        keys: what shares a scale of keys, or of latents in their place: the tokens of a "channel" or the channels of a
            "token". By channel is better for latents too, at fewer bytes: some of them are much larger than others.
        hadamard: fold a rotation into the weights that spreads outliers of values and latents over their channels.
        sinks: first tokens that stay exact.
        streaming_bits: of hybrid models, bits of what streaming heads keep; None: as many as of the others.
        rope_bits: of MLA, bits of the rotated numbers, which are quantised by token: 16 leaves them as they are, None
            takes ``bits``.
    """

    bits: int | str = 4
    window: int = 0
    streaming_bits: int | str | None = None
    rope_bits: int | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is None:
            raise SurgeryError("bits: choose 8, 4, 2 or fp8")
        if self.kv_ratio is not None:
            raise SurgeryError("kv_ratio: the bytes of a quantised cache follow from bits, group and window")
        if self.window < 0:
            raise SurgeryError(f"window must be at least 0, not {self.window}")
        if self.streaming_bits is not None:
            self._check_bits("streaming_bits")
        check_rope_bits(self)

    @property
    def suffix(self) -> str:
        """Nothing: the target's own name says it."""
        return ""

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        said = {**super().kv_cache(), "window": self.window}
        return with_formats(said, streaming_format=self.streaming_bits, rope_format=self.rope_bits)
