"""``surgery convert``: a checkpoint from another. Torch is imported inside the verb only."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli.generated import Given, with_settings
from surgery.cli.options import (
    OUTPUT,
    CheckpointArgument,
    ConfigOption,
    DryRunOption,
    JsonOption,
    KeepCodeOption,
    OverwriteOption,
    PickleOption,
    RestartOption,
    command_line,
    option,
)
from surgery.cli.verbs import Verb, equip
from surgery.common.errors import SurgeryError
from surgery.structures.registry import DEFAULT, TARGETS, described, find_target

CONVERTED = {target.name: target.settings_class for target in TARGETS.working().values() if not target.fixed}
"""Settings of each target that has a class of its own."""


class ConvertVerb(Verb):
    """``--to NAME --help`` is the help of that target alone: of all together most options are some other's."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        words = [word for arg in args for word in arg.split("=", 1)]
        ctx.meta["to"] = next((value for flag, value in pairwise(words) if flag == "--to"), None)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        if (to := ctx.meta["to"]) is None:
            super().format_help(ctx, formatter)
            return
        target = find_target(to)
        app = typer.Typer(rich_markup_mode="markdown", add_completion=False)
        app.command("convert", cls=Verb, help=_examples_of(to))(with_settings(convert, {to: target.settings_class}))
        equip(app)
        typer.main.get_command(app).format_help(ctx, formatter)


def _examples_of(to: str) -> str:
    """The verb's help with the examples of one target."""
    paragraphs = inspect.cleandoc(convert.__doc__).split("\n\n")
    said = [each for each in paragraphs if "--to " not in each or f"--to {to} " in each]
    return "\n\n".join(said)


def convert(
    checkpoint: CheckpointArgument,
    given: Given,
    to: Annotated[
        str | None,
        option(
            "--to",
            "NAME",
            f"What the attention becomes: {described()}. With --help: the options of that one. [{DEFAULT}]",
        ),
    ] = None,
    out: Annotated[Path | None, option("--out", "DIR", "Folder to write. [CKPT-TARGET, beside it]", OUTPUT)] = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    plan: Annotated[Path | None, option("--plan", "FILE", "What surgery plan chose; flags win over it.")] = None,
    dry_run: DryRunOption = False,
    restart: RestartOption = False,
    allow_pickle: PickleOption = False,
    keep_code: KeepCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint's attention and write the result beside it.

    Examples:

        surgery convert --to mla ckpt/

        surgery convert --to mla ckpt/ --kv-ratio 0.125 --out small/ --device cuda

        surgery convert --to mla org/name --kv-lora-rank 512 --rope-dim 64 --rope-frequencies grid

        surgery convert --to mla ckpt/ --engine vllm

        surgery convert --to gqa ckpt/ --kv-heads 4

        surgery convert --to lowrank ckpt/ --kv-ratio 0.125 --window 32 --sinks 4

        surgery convert --to crosslayer ckpt/ --kv-ratio 0.125 --group-size 4

        surgery convert --to hybrid ckpt/ --heads ckpt-heads-duo.safetensors --kv-ratio 0.4

        surgery convert --to lowrank ckpt/ --kv-ratio 0.5 --bits 4

        surgery convert --to quantized ckpt-lowrank/ --bits 4

        surgery convert ckpt/ --plan plan.yaml
    """
    from surgery.checkpoint.named_models import model_named, output_of

    planned = None
    if plan is not None:
        if config is not None or to is not None:
            raise SurgeryError("--plan says what the attention becomes: leave --to and --config out")
        from surgery.planning.plan_file import read_plan

        planned = read_plan(plan)
        to = planned.target.name
    to = to or DEFAULT
    target = find_target(to)
    if planned is None and (better := target.settings_class.needless(given.get)) is not None:
        print(better)
        return
    chosen = dict(planned.settings) if planned else {}
    settings = target.settings({**chosen, **given.of(target.settings_class, f"--to {to}")}, config)
    called, checkpoint, out = checkpoint, model_named(checkpoint), output_of(checkpoint, out, to)
    target.check_places(checkpoint, out, settings, overwrite=overwrite)

    from surgery.common.progress import Progress
    from surgery.console.conversion import show_conversion, show_plan

    if dry_run:
        from surgery.structures.dry_run import plan_conversion

        plan = plan_conversion(checkpoint, out, settings, overwrite=overwrite, allow_pickle=allow_pickle)
        show_plan(plan, called, as_json=as_json)
        return
    from surgery.structures import converter

    conversion = converter.convert(
        checkpoint,
        out,
        settings,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        keep_code=keep_code,
        command=command_line(),
        predicted=planned and planned.predicted,
        restart=restart,
        shared=True,
        progress=Progress(),
    )
    if conversion is not None:
        show_conversion(replace(conversion, source=called), as_json=as_json)
