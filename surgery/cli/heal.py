"""``surgery heal``: distillation from the source. Torch is imported inside the command only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.generated import OptionValues
from surgery.cli.options import (
    ADVANCED,
    MACHINE,
    OUTPUT,
    CheckpointArgument,
    JsonOption,
    RestartOption,
    command_line,
    config_file,
    flag,
    option,
)
from surgery.common.file_settings import read_mapping
from surgery.training.settings import HealSettings


def heal(
    checkpoint: CheckpointArgument,
    options: OptionValues,
    out: Annotated[Path | None, option("--out", "DIR", "Folder to write. [CKPT-healed, next to it]", OUTPUT)] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "--recipe",
            metavar="FILE|NAME",
            help="All settings, as in `surgery config heal`; flags override them.",
            callback=config_file,
        ),
    ] = None,
    processes: Annotated[
        int | None, option("--processes", "N", "Processes to start. [the launcher's, or 1]", MACHINE), ADVANCED
    ] = None,
    launcher: Annotated[
        str | None,
        option("--launcher", "NAME|FILE", "accelerate configuration: cpu-2, gpu-1, fsdp2 or a file.", MACHINE),
    ] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an existing checkpoint.", OUTPUT)] = False,
    measure: Annotated[
        bool,
        flag(
            "--measure/--no-measure",
            "Measure loss and recall of source, conversion and result on held-out text. [on; --no-measure for off]",
            OUTPUT,
            show_default=False,
        ),
        ADVANCED,
    ] = True,
    restart: RestartOption = False,
    dry_run: Annotated[
        bool, flag("--dry-run", "Only estimate memory, disk and time from shapes; write nothing.", OUTPUT)
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Recover the accuracy of a converted checkpoint by distillation from its source.

    Runs `accelerate launch -m surgery.training.heal`, verifies the result like a conversion, and measures it. After an
    interruption the same command resumes.

    Examples:

        surgery heal ckpt-mla/ --max-tokens 20000000

        surgery heal surgery-demo/ --teacher builtin --max-time 300

        surgery heal ckpt-mla/ --teacher ckpt/ --data text.jsonl --launcher fsdp2 --wandb my-project

        surgery heal ckpt-mla/ --teacher ckpt/ --dtype bf16 --dry-run
    """
    from surgery.checkpoint.location import find_local
    from surgery.checkpoint.named_models import model_named, output_of
    from surgery.checkpoint.output_path import settle_output
    from surgery.healing.launchers import check_processes, find_launcher

    check_processes(processes)
    from_options = options.of(HealSettings)
    read = read_mapping(config) if config else {}
    if isinstance(teacher := from_options.get("teacher", read.get("teacher")), str):
        from_options["teacher"] = model_named(teacher)
    HealSettings.from_mapping({"teacher": "its source", **read, **from_options}, str(config or "heal"))
    student, out = model_named(checkpoint), output_of(checkpoint, out, "healed")
    # Check paths before torch is imported.
    settle_output(student, find_local(student), out, "healed", overwrite=overwrite)
    if "teacher" in from_options:
        find_local(from_options["teacher"])

    from surgery.common.progress import Progress
    from surgery.console.heal import show_healed, show_plan
    from surgery.healing.heal import HealRequest, heal_checkpoint

    request = HealRequest(
        student,
        out,
        config,
        from_options,
        processes=processes,
        launcher=None if launcher is None else find_launcher(launcher),
        measure={} if measure else None,
        overwrite=overwrite,
        restart=restart,
        command=command_line(),
    )
    if dry_run:
        from surgery.healing.dry_run import plan_healing

        show_plan(plan_healing(request), as_json=as_json)
        return
    show_healed(heal_checkpoint(request, Progress()), as_json=as_json)
