"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.common.shipped import find_shipped

INPUTS = "Inputs"
OUTPUT = "Output"
MACHINE = "Machine"


def config_file(given: Path | None) -> Path | None:
    """The file of a ``--config``."""
    return None if given is None else find_shipped(given, "configs")


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="Folder, .gguf file or hub id (org/name); builtin is the demo model, smollm2 SmolLM2-135M.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")]
PickleOption = Annotated[bool, typer.Option("--allow-pickle", help="Read pickled weights if there are no others.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Where layers run: cpu, cuda, cuda:1 … [cuda if there is one]",
        rich_help_panel=MACHINE,
    ),
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
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        metavar="N",
        min=1,
        help="Processes that share the work, each with a GPU where there are some. [a launcher's, or 1]",
        rich_help_panel=MACHINE,
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print what it would do and take; write nothing.")
]
RestartOption = Annotated[bool, typer.Option("--restart", help="Begin anew where what was interrupted would go on.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing checkpoint.", rich_help_panel=OUTPUT)
]
