"""Settings of ``surgery heads`` and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from surgery.common.file_settings import FileSettings
from surgery.common.setting import DTYPE_NAMES, setting

Method = Literal["duo", "needle", "induction"]
METHODS = get_args(Method)
SUFFIX = ".safetensors"
"""Suffix of pattern files."""

STEPS = 80
"""Default training steps. After these, gates rank the demo model's heads as after 150 at half the learning rate (rank
correlation 0.99). Tested on the demo model only."""


@dataclass(frozen=True)
class HeadSettings(FileSettings):
    """Settings of ``surgery heads``."""

    method: Method = setting(
        "duo",
        "Scoring method: duo trains gates; the others measure attention and take about a minute.",
        plugins="scorers",
        section="Method",
        metavar="NAME",
    )
    sinks: int = setting(64, "First tokens that a streaming head sees.", least=0, section="Streaming heads")
    recent: int = setting(256, "Recent tokens that it sees, including the query's own.", least=1, flag="window")
    target: float = setting(0.25, "Share of heads that stay full.", least=0, most=1, section="Training of gates (duo)")
    steps: int = setting(STEPS, "Training steps, one sequence each.", least=1, advanced=True)
    learning_rate: float | None = setting(None, "Learning rate of the gates.", above=0, unset="0.04", advanced=True)
    text: str = setting(
        "builtin",
        "Text to score on, in which needles are planted.",
        more="builtin is the standard library's source; or prose, code or docstrings as in other commands, a .txt, "
        ".jsonl or .parquet file, or the name of a dataset.",
        section="Inputs",
        metavar="FILE|DATASET|builtin",
        old=("--calibration", "--data"),
    )
    text_field: str = setting("text", "Column that holds the text.", metavar="NAME", advanced=True)
    length: int | None = setting(
        None, "Tokens per sequence.", least=1, unset="4096, or half of the model's context length if that is shorter"
    )
    samples: int | None = setting(
        None, "Number of sequences for methods without training.", least=1, unset="the method's own number"
    )
    facts: int = setting(10, "Planted facts per sequence with needles.", least=1, advanced=True)
    seeds: int = setting(
        1, "Number of scorings with other data, whose mean and spread are stored.", least=1, advanced=True
    )
    seed: int = setting(0, "First seed.", advanced=True)
    device: str = setting(
        "auto",
        "Where the model runs: cpu, cuda, cuda:1 …; auto is cuda if available.",
        section="Machine",
        metavar="NAME",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = setting(
        "auto",
        "Dtype of the model: auto is bfloat16, or float32 on a CPU; fp32 and float32 are the same.",
        more="Gates and scores are always float32.",
        synonyms=DTYPE_NAMES,
        advanced=True,
    )
