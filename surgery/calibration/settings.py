"""What a user can ask of every conversion: its text, where and in what layers run. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings

NO_CALIBRATION = "none"


@dataclass(frozen=True)
class ConversionSettings(FileSettings):
    """What all conversions can be asked for.

    Attributes:
        kv_ratio: share of the source's KV bytes per token to keep.
        calibration: builtin, self, a file, a datasets name, shares of several such as "prose=0.5,code=0.3,chat=0.2", or
            none for weights only.
        recall: share of calibration sequences that carry planted recalls.
        held_out_text: a file or a datasets name that the held-out sequences are from; None: text that belongs to the
            calibration's, other documents.
        held_out: sequences for choices between results and for the report's losses, and as many recall prompts.
        device: where layers run; "auto" is a CUDA device if there is one, otherwise the CPU.
        dtype: in which layers run during calibration and measurement.
        keep_statistics: a folder in which statistics of the source are kept, and taken from where those of the same
            source, text, seed, dtype and batch size are there already.
    """

    kv_ratio: float | None = None
    calibration: str = "builtin"
    calibration_tokens: int = 24_576
    calibration_length: int = 1_024
    text_field: str = "text"
    recall: float = 0.5
    held_out: int = 8
    held_out_text: str | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    batch_size: int = 4
    max_shard_size: str = "5GB"
    keep_statistics: str | None = None

    def __post_init__(self) -> None:
        self._check_choice("dtype", ("float32", "bfloat16", "float64"))
        if self.kv_ratio is not None and not 0 < self.kv_ratio < 1:
            raise SurgeryError(f"kv_ratio {self.kv_ratio} must lie between 0 and 1, such as 0.25")
        self._check_positive("calibration_tokens", "calibration_length", "batch_size", "held_out")
        if self.held_out_text in ("builtin", "self", NO_CALIBRATION, self.calibration):
            raise SurgeryError(f"held_out_text {self.held_out_text}: name a text that is not the calibration's own")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise SurgeryError(f"{name} {getattr(self, name)!r} is unknown: choose {', '.join(allowed)}")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SurgeryError(f"{name} must be at least 1, not {value}")
