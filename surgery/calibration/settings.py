"""Settings shared by all conversions: text, device, dtype, output. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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
        None,
        "Share of the source's KV bytes per token to keep.",
        above=0,
        below=1,
        section="Budget",
        unset="0.25",
    )
    calibration: str = setting(
        "builtin",
        "Text to calibrate on: builtin, or shares, as prose=0.5,code=0.3,chat=0.2; none uses the weights alone.",
        more="builtin: see docs/calibration.md. Or a .txt, .jsonl or .parquet file, or the name of a dataset. Where "
        "nothing is calibrated, text serves to measure the loss only.",
        section="Inputs",
        metavar="FILE|DATASET|NAME",
        old=("--text", "--data"),
    )
    calibration_tokens: int = setting(24_576, "Tokens to calibrate on.", least=1)
    calibration_length: int = setting(1_024, "Tokens in a sequence.", least=1, advanced=True)
    text_field: str = setting("text", "Column that holds the text.", metavar="NAME", advanced=True)
    recall: float = setting(
        0.5,
        "Share of sequences with planted recalls.",
        more="Facts are planted in them and asked for again, which keeps retrieval alive.",
        least=0,
        most=1,
        advanced=True,
    )
    held_out: int = setting(
        8, "Held-out sequences for choices and the report.", more="As many recall prompts.", least=1, advanced=True
    )
    held_out_text: str | None = setting(
        None,
        "Where held-out sequences are from.",
        unset="other documents than the calibration's",
        metavar="FILE|DATASET",
        advanced=True,
    )
    seed: int = setting(0, "Seed of every random choice.", advanced=True)
    device: str = setting(
        "auto",
        "Where layers run: cpu, cuda, cuda:1 …; auto is cuda if there is one.",
        section="Machine",
        metavar="NAME",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = setting(
        "float32", "What layers run in while measuring; float32 and fp32 are one.", synonyms=DTYPE_NAMES, advanced=True
    )
    batch_size: int = setting(4, "Sequences at a time.", least=1, advanced=True)
    activation_memory: str | None = setting(
        None,
        "Activations of the calibration text that may be in memory, as 4GiB; those beyond lie on the disk.",
        more="Results are the same to the last bit.",
        unset="all",
        metavar="SIZE",
        advanced=True,
    )
    weights_dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None,
        "Dtype of the written weights; the source is rounded to it as it is read.",
        more="float16 overflows where bfloat16 does not, in weights and in what models compute.",
        section="Output",
        unset="the source's",
        synonyms=DTYPE_NAMES,
        advanced=True,
    )
    max_shard_size: str = setting("5GB", "Largest weight file.", metavar="SIZE", advanced=True)
    keep_statistics: str | None = setting(
        None,
        "Keep what is learnt of the source there, and take it from there if it is of the same source and text.",
        more="Seed, dtype and batch size have to be the same too.",
        section="Inputs",
        metavar="FOLDER",
        advanced=True,
    )

    @classmethod
    def needless(cls, option: Callable[[str], str | None]) -> str | None:
        """Return advice if an alternative beats a conversion with these options, else None."""
        return None

    def ending(self, target: str) -> str:
        """Return the suffix of the output's default name."""
        return target

    def deciding(self) -> dict[str, Any]:
        """Return the settings that determine the result, as plain values, with ``activation_memory`` as None."""
        return {**self.to_dict(), "activation_memory": None}

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_size(self.max_shard_size, "max_shard_size")
        if self.activation_memory is not None:
            parse_size(self.activation_memory, "activation_memory")
        if notice := removal(f"calibration {self.calibration}"):
            raise SurgeryError(f"calibration {self.calibration} {notice}", setting="calibration")
        if self.held_out_text in ("builtin", NO_CALIBRATION, self.calibration):
            raise SurgeryError(
                f"held_out_text {self.held_out_text}: name a text that is not the calibration's own",
                setting="held_out_text",
            )
