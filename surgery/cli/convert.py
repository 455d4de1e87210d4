"""``surgery convert``: conversion of a checkpoint. Torch is imported inside the command only."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgery.cli.commands import HELP_ALL, SurgeryCommand, equip
from surgery.cli.generated import OptionValues, with_settings
from surgery.cli.options import (
    OUTPUT,
    CheckpointArgument,
    ConfigOption,
    DryRunOption,
    JsonOption,
    KeepCodeOption,
    OverwriteOption,
    RestartOption,
    check_launcher,
    command_line,
    option,
)
from surgery.common.errors import SurgeryError
from surgery.common.human import seconds_of
from surgery.structures.registry import DEFAULT, TARGETS, described, find_target

CONVERTED = {target.name: target.settings_class for target in TARGETS.working().values() if not target.fixed}
"""Settings classes of the conversion targets, by name."""

if TYPE_CHECKING:
    from surgery.structures.request import ConversionRequest


class ConvertCommand(SurgeryCommand):
    """Command whose ``--help`` shows the options of one target; ``--help-all`` without ``--to`` shows all targets'."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        words = [word for arg in args for word in arg.split("=", 1)]
        ctx.meta["to"] = next((value for flag, value in pairwise(words) if flag == "--to"), None)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        to, everything = ctx.meta["to"], ctx.meta.get(HELP_ALL)
        if to is None and everything:
            super().format_help(ctx, formatter)
            return
        settings_class = find_target(to or DEFAULT).settings_class
        app = typer.Typer(rich_markup_mode="markdown", add_completion=False)
        cls, text = (OtherTargets, None) if to is None else (SurgeryCommand, _examples_of(to))
        app.command("convert", cls=cls, help=text)(with_settings(convert, {to or DEFAULT: settings_class}))
        equip(app)
        typer.main.get_command(app).format_help(ctx, formatter)


class OtherTargets(SurgeryCommand):
    """Help of the default target, for calls without ``--to``."""

    more = f"Options of --to {DEFAULT}. `--to NAME --help` shows another's, `--help-all` all."


def _examples_of(to: str) -> str:
    """Return the command's help with only the examples of one target."""
    paragraphs = inspect.cleandoc(convert.__doc__).split("\n\n")
    selected = [each for each in paragraphs if "--to " not in each or f"--to {to} " in each]
    return "\n\n".join(selected)


def convert(
    checkpoint: CheckpointArgument,
    options: OptionValues,
    to: Annotated[
        str | None,
        option("--to", "NAME", f"Target structure: {described()}. With --help, shows its options. [{DEFAULT}]"),
    ] = None,
    out: Annotated[Path | None, option("--out", "DIR", "Folder to write. [CKPT-TARGET, next to it]", OUTPUT)] = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    plan: Annotated[
        Path | None, option("--plan", "FILE", "Plan file of surgery plan --out; flags override it.")
    ] = None,
    heal: Annotated[
        str | None,
        option("--heal", "DURATION", "Then heal the result by distillation from the source, for 5m, 300s or 1h30m."),
    ] = None,
    dry_run: DryRunOption = False,
    restart: RestartOption = False,
    keep_code: KeepCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint's attention and write the result next to it.

    Examples:

        surgery convert --to mla ckpt/

        surgery convert --to mla ckpt/ --kv-ratio 0.125 --out small/ --device cuda

        surgery convert --to mla org/name --kv-lora-rank 512 --rope-dim 64

        surgery convert --to mla ckpt/ --carrier stock --heal 5m

        surgery convert --to mla ckpt/ --engine vllm

        surgery convert --to gqa ckpt/ --kv-heads 4

        surgery convert --to lowrank ckpt/ --kv-ratio 0.125 --window 32 --sinks 4

        surgery convert --to crosslayer ckpt/ --kv-ratio 0.0625

        surgery convert --to hybrid ckpt/ --heads duo.safetensors --kv-ratio 0.4

        surgery convert --to lowrank ckpt/ --bits auto --kv-ratio 0.125

        surgery convert --to quantized ckpt/ --kv-ratio 0.25

        surgery convert ckpt/ --plan plan.yaml
    """
    check_launcher()
    from surgery.checkpoint.named_models import find_model, model_named, output_of
    from surgery.console.page import print_json, typed

    planned = None
    if plan is not None:
        if config is not None or to is not None:
            raise SurgeryError("--plan already sets the target: remove --to and --config")
        from surgery.planning.plan_file import read_plan

        planned = read_plan(plan)
        to = planned.target.name
    to = to or DEFAULT
    target = find_target(to)
    seconds = None if heal is None else seconds_of(heal, "--heal")
    if planned is None and (better := target.settings_class.better_alternative(options.get)) is not None:
        better = better.replace("CKPT", typed(find_model(checkpoint)))
        print_json({"needs_conversion": False, "reason": better}) if as_json else print(better)
        return
    defaults = dict(planned.settings) if planned else {}
    settings = target.settings({**defaults, **options.of(target.settings_class, f"--to {to}")}, config)
    called, checkpoint, out = checkpoint, model_named(checkpoint), output_of(checkpoint, out, to)
    out = target.check_paths(checkpoint, out, settings, overwrite=overwrite)

    from surgery.common.progress import Progress
    from surgery.console.conversion import show_conversion
    from surgery.structures.request import ConversionRequest

    request = ConversionRequest(
        checkpoint,
        out,
        settings,
        overwrite=overwrite,
        keep_code=keep_code,
        command=command_line(),
        predicted=planned and planned.predicted,
        restart=restart,
    )
    if dry_run:
        _show_dry_run(request, called, seconds, as_json=as_json)
        return
    if seconds is None:
        from surgery.structures import converter

        conversion = converter.convert(request, progress=Progress())
    else:
        from surgery.healing.convert_and_heal import convert_and_heal

        conversion = convert_and_heal(request, {"max_seconds": seconds}, measure={}, progress=Progress())
    show_conversion(replace(conversion, source=called), as_json=as_json)


def _show_dry_run(request: ConversionRequest, called: str, seconds: float | None, *, as_json: bool) -> None:
    from surgery.console.conversion import show_plan

    if seconds is None:
        from surgery.structures.dry_run import plan_conversion

        plan = plan_conversion(request.source, request.out, request.settings, overwrite=request.overwrite)
        healing = None
    else:
        from surgery.healing.convert_and_heal import plan_both

        plan, healing = plan_both(request, {"max_seconds": seconds})
    show_plan(plan, called, healing, as_json=as_json)
