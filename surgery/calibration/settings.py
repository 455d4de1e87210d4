"""Settings shared by all conversions: text, device, dtype, output. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from surgery.checkpoint.disk import parse_size
from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings
from surgery.common.removed import removal
from surgery.common.setting import DTYPE_NAMES, setting

NO_CALIBRATION = "none"


@dataclass(frozen=True)
class ConversionSettings(FileSettings):
    """Base settings of all conversions."""

    kv_ratio: float | None = setting(
        None, "Share of the source's KV bytes per token to keep.", above=0, below=1, section="Budget", unset="0.25"
    )
    calibration: str = setting(
        "builtin",
        "Calibration text: builtin, or shares such as prose=0.5,code=0.3,chat=0.2; none uses the weights alone.",
        more="builtin: see docs/calibration.md. Or a .txt, .jsonl or .parquet file, or the name of a dataset. Methods "
        "without calibration only measure the loss on it.",
        section="Inputs",
        metavar="FILE|DATASET|NAME",
        old=("--text", "--data"),
    )
    calibration_tokens: int = setting(24_576, "Number of calibration tokens.", least=1)
    calibration_length: int = setting(1_024, "Tokens per sequence.", least=1, advanced=True)
    text_field: str = setting("text", "Column that holds the text.", metavar="NAME", advanced=True)
    recall: float = setting(
        0.5,
        "Share of calibration sequences with planted facts.",
        more="The facts are asked for later in the sequence, which preserves retrieval.",
        least=0,
        most=1,
        advanced=True,
    )
    held_out: int = setting(
        8,
        "Held-out sequences for choices and the report.",
        more="The number of recall prompts is the same.",
        least=1,
        advanced=True,
    )
    seed: int = setting(0, "Seed of every random choice.", advanced=True)
    device: str = setting(
        "auto", "Where layers run: cpu, cuda, cuda:1 …; auto is cuda if available.", section="Machine", metavar="NAME"
    )
    dtype: Literal["float32", "bfloat16", "float64"] = setting(
        "float32",
        "Dtype of the layers during calibration; fp32 and float32 are the same.",
        synonyms=DTYPE_NAMES,
        advanced=True,
    )
    batch_size: int = setting(4, "Sequences per batch.", least=1, advanced=True)
    weights_dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None,
        "Dtype of the written weights; the source is cast to it on reading.",
        more="Unlike bfloat16, float16 may overflow, in weights and in activations.",
        section="Output",
        unset="the source's",
        synonyms=DTYPE_NAMES,
        advanced=True,
    )
    max_shard_size: str = setting("5GB", "Maximum size of a weight file.", metavar="SIZE", advanced=True)
    keep_statistics: str | None = setting(
        None,
        "Folder to store calibration statistics in, and to reuse them from for the same source and text.",
        more="Seed, dtype and batch size must match too.",
        section="Inputs",
        metavar="FOLDER",
        advanced=True,
    )

    @classmethod
    def better_alternative(cls, option: Callable[[str], str | None]) -> str | None:
        """Return advice if an alternative beats a conversion with these options, else None."""
        return None

    def ending(self, target: str) -> str:
        """Return the suffix of the output's default name."""
        return target

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_size(self.max_shard_size, "max_shard_size")
        if notice := removal(f"calibration {self.calibration}"):
            raise SurgeryError(f"calibration {self.calibration} {notice}", setting="calibration")
