"""The verb ``heal``. Torch is imported inside it only."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import MACHINE, OUTPUT, CheckpointArgument, JsonOption, config_file

TRAINING = "Training"
BUDGET = "Budget"


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(heal)


def heal(
    checkpoint: CheckpointArgument,
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            metavar="SRC|builtin|smollm2",
            help="What to distil from [its source, as its report names it]; builtin is the model that ships.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="FILE|DATASET|builtin|teacher",
            help="Text to train on, more than once for several [builtin, the standard library's source].",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder to write [CKPT-healed, beside it].", rich_help_panel=OUTPUT),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "--recipe",
            metavar="FILE|NAME",
            help="All settings, as in `surgery configs --copy heal`; flags win.",
            callback=config_file,
            rich_help_panel=TRAINING,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", help="Stop after so many.", rich_help_panel=BUDGET)
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option("--max-time", metavar="SECONDS", help="Stop after so long.", rich_help_panel=BUDGET),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option("--train", help="all, attention (default), new or lora.", rich_help_panel=TRAINING),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", metavar="F", help="At its peak [1e-4].", rich_help_panel=TRAINING)
    ] = None,
    length: Annotated[
        int | None, typer.Option("--length", metavar="N", help="Tokens of a sequence [1024].", rich_help_panel=TRAINING)
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", metavar="N", help="Sequences of a process at once [4].", rich_help_panel=TRAINING),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            "--evaluate-every", metavar="N", help="Steps between loss and recall on the way.", rich_help_panel=TRAINING
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="[0]", rich_help_panel=TRAINING)] = None,
    tracker: Annotated[
        str | None,
        typer.Option("--tracker", help="wandb, tensorboard … [none; a JSONL log always].", rich_help_panel=OUTPUT),
    ] = None,
    wandb_mode: Annotated[
        str | None, typer.Option("--wandb-mode", help="online (default), offline or disabled.", rich_help_panel=OUTPUT)
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", metavar="NAME", help="Of the tracker.", rich_help_panel=OUTPUT)
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", metavar="N", help="To start [the launcher's, or 1].", rich_help_panel=MACHINE),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher",
            metavar="NAME|FILE",
            help="accelerate configuration: cpu-2, gpu-1, fsdp2, zero3 or a file.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto (default) or cpu.", rich_help_panel=MACHINE)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="fp32, bf16, fp16 or auto (default).", rich_help_panel=MACHINE)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing checkpoint.", rich_help_panel=OUTPUT)
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Loss and recall of the source, before and after, on held-out text.",
            rich_help_panel=OUTPUT,
        ),
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only say what it would take, from shapes; write nothing.", rich_help_panel=OUTPUT
        ),
    ] = False,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            "--peak-tflops", metavar="F", help="Of a device, for the time of a dry run.", rich_help_panel=OUTPUT
        ),
    ] = None,
    utilisation: Annotated[
        float, typer.Option("--utilisation", metavar="F", help="Share of it to reckon with.", rich_help_panel=OUTPUT)
    ] = 0.4,
    as_json: JsonOption = False,
) -> None:
    """Give a converted checkpoint its accuracy back, by distillation from its source.

    Composes and runs `accelerate launch -m surgery.training.heal`, verifies what comes of it as conversions are, and
    measures it. Interrupted, the same command goes on.

    Examples:

        surgery heal ckpt-mla/ --max-tokens 20000000

        surgery heal surgery-demo/ --teacher builtin --max-time 300

        surgery heal ckpt-mla/ --teacher ckpt/ --data text.jsonl --launcher fsdp2 --tracker wandb

        surgery heal ckpt-mla/ --teacher ckpt/ --dtype bf16 --dry-run --peak-tflops 989
    """
    from surgery.checkpoint.location import find_local
    from surgery.checkpoint.named_models import model_named, output_of
    from surgery.checkpoint.output_place import settle_output
    from surgery.healing.launchers import check_processes, find_launcher

    check_processes(processes)
    given = {
        "teacher": None if teacher is None else model_named(teacher),
        "data": tuple(data) if data else None,
        "max_tokens": max_tokens,
        "max_seconds": max_seconds,
        "train": train,
        "learning_rate": learning_rate,
        "length": length,
        "batch_size": batch_size,
        "evaluate_every": evaluate_every,
        "seed": seed,
        "tracker": tracker,
        "wandb_mode": wandb_mode,
        "project": project,
        "device": device,
        "dtype": dtype,
    }
    given = {name: value for name, value in given.items() if value is not None}
    student, out = model_named(checkpoint), output_of(checkpoint, out, "healed")
    # Before torch is loaded for it: places that would be refused later.
    settle_output(student, find_local(student), out, "healed", overwrite=overwrite)
    if "teacher" in given:
        find_local(given["teacher"])

    from surgery.common.progress import Progress
    from surgery.console.heal import show_healed, show_plan
    from surgery.healing.heal import HealRequest, heal_checkpoint, plan_healing

    request = HealRequest(
        student,
        out,
        config,
        given,
        processes=processes,
        launcher=None if launcher is None else find_launcher(launcher),
        measure={} if measure else None,
        overwrite=overwrite,
        command=shlex.join(["surgery", *sys.argv[1:]]),
    )
    if dry_run:
        peak = None if peak_tflops is None else peak_tflops * 1e12
        show_plan(plan_healing(request, peak, utilisation), as_json=as_json)
        return
    show_healed(heal_checkpoint(request, Progress()), as_json=as_json)
