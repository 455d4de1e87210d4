"""Arguments and options that several commands share."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.common.errors import SurgeryError
from surgery.common.shipped import find_shipped

INPUTS = "Inputs"
OUTPUT = "Output"
ADVANCED = "advanced"
"""Annotation of options that only --help-all shows; for settings, see ``FieldInfo``."""
MACHINE = "Machine"


def config_file(path: Path | None) -> Path | None:
    """Resolve the value of ``--config``: a path, or the name of a config that ships."""
    return None if path is None else find_shipped(path, "configs")


def check_launcher() -> None:
    """Raise SurgeryError, printed by the first process only, in one of several processes of torchrun or accelerate."""
    if (size := os.environ.get("WORLD_SIZE") or "1") != "1":
        error = SurgeryError(
            f"WORLD_SIZE={size}: this command runs as one process; start it without a launcher (surgery heal "
            "--processes N and torchrun -m surgery eval use several), or unset WORLD_SIZE"
        )
        error.shared = True
        raise error


def command_line() -> str:
    """Return the command line, quoted for a shell, for reports."""
    return shlex.join(["surgery", *sys.argv[1:]])


def option(name: str, metavar: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Create an option that takes a value."""
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=panel, **more)


def flag(name: str, help: str, panel: str | None = None, **more: Any) -> Any:
    """Create an option without a value, or whose values follow from its type."""
    return typer.Option(name, help=help, rich_help_panel=panel, **more)


CHECKPOINT = "Folder, .gguf file or hub id (org/name); builtin is the demo model, smollm2 SmolLM2-135M."
CheckpointArgument = Annotated[str, typer.Argument(metavar="CKPT", help=CHECKPOINT)]
JsonOption = Annotated[bool, flag("--json", "Print the report as JSON on standard output.")]
KeepCodeOption = Annotated[
    bool, flag("--keep-code", "Also copy the source's code files (*.py, custom_generate/).", OUTPUT), ADVANCED
]
DeviceOption = Annotated[
    str | None,
    option("--device", "NAME", "Where layers run: cpu, cuda, cuda:1 …; auto is cuda if available. [auto]", MACHINE),
]
ConfigOption = Annotated[
    Path | None,
    option(
        "--config",
        "FILE|NAME",
        "YAML settings file, or the name of a shipped one (surgery config); flags override it.",
        callback=config_file,
    ),
]
DryRunOption = Annotated[bool, flag("--dry-run", "Check everything, estimate memory, disk and time; write nothing.")]
RestartOption = Annotated[
    bool, flag("--restart", "Start from scratch instead of resuming an interrupted run."), ADVANCED
]
OverwriteOption = Annotated[bool, flag("--overwrite", "Replace an existing checkpoint.", OUTPUT)]
