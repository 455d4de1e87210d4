"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.common.shipped import find_shipped

CALIBRATION = "Inputs"
BUDGET = "Budget"
OUTPUT = "Output"
MACHINE = "Machine"


def config_file(given: Path | None) -> Path | None:
    """The file of a ``--config``."""
    return None if given is None else find_shipped(given, "configs")


CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CKPT", help="Folder, .gguf file or hub id (org/name); or builtin, smollm2.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")]
PickleOption = Annotated[bool, typer.Option("--allow-pickle", help="Read pickled weights if there are no others.")]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE|DATASET|self|builtin|none",
        help="Text to calibrate on [builtin]; shares of several, as prose=0.5,code=0.3,chat=0.2; none uses the weights "
        "alone.",
        rich_help_panel=CALIBRATION,
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--calibration-tokens", metavar="N", help="Tokens to calibrate on [24576].", rich_help_panel=CALIBRATION
    ),
]
LengthOption = Annotated[
    int | None,
    typer.Option("--calibration-length", metavar="N", help="Tokens in a sequence [1024].", rich_help_panel=CALIBRATION),
]
FieldOption = Annotated[
    str | None,
    typer.Option(
        "--text-field", metavar="NAME", help="Column that holds the text [text].", rich_help_panel=CALIBRATION
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Seed of every random choice [0].", rich_help_panel=CALIBRATION),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", help="Where layers run: cpu, cuda, cuda:1 … [cuda if there is one].", rich_help_panel=MACHINE
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="What layers run in while measuring: float32, bfloat16, float64 [float32].",
        rich_help_panel=MACHINE,
    ),
]
BatchOption = Annotated[
    int | None, typer.Option("--batch-size", metavar="N", help="Sequences at a time [4].", rich_help_panel=MACHINE)
]
KeepStatisticsOption = Annotated[
    str | None,
    typer.Option(
        "--keep-statistics",
        metavar="FOLDER",
        help="Keep what is learnt of the source there, and take it from there if it is of the same source and text.",
        rich_help_panel=CALIBRATION,
    ),
]
ShardSizeOption = Annotated[
    str | None,
    typer.Option("--max-shard-size", metavar="SIZE", help="Largest weight file [5GB].", rich_help_panel=OUTPUT),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE|NAME",
        help="YAML of settings, or the name of one that ships (surgery configs); flags win over it.",
        callback=config_file,
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing checkpoint.", rich_help_panel=OUTPUT)
]
