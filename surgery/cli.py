"""The command line: ``surgery VERB``. Imports torch only inside the verbs, so that ``--help`` answers at once."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from surgery import cli_evaluation
from surgery.cli_options import (
    BUDGET,
    CALIBRATION,
    OUTPUT,
    BatchOption,
    CalibrationOption,
    CheckpointArgument,
    DeviceOption,
    DtypeOption,
    FieldOption,
    JsonOption,
    LengthOption,
    PickleOption,
    SeedOption,
    TokensOption,
)
from surgery.errors import SurgeryError
from surgery.version import __version__

app = typer.Typer(
    name="surgery",
    help="Rewrites the attention of pretrained language models so that the KV cache becomes 2-20x smaller.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version_callback(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit()


@app.command()
def convert(
    checkpoint: CheckpointArgument,
    to: Annotated[
        str, typer.Option("--to", help="mla; gqa (fewer KV heads) or mqa (one), in the source's own class.")
    ] = "mla",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder to write [CKPT-TARGET, beside it].", rich_help_panel=OUTPUT),
    ] = None,
    kv_ratio: Annotated[
        float | None,
        typer.Option(
            "--kv-ratio",
            metavar="F",
            help="Share of the KV bytes per token to keep [mla 0.25, gqa 0.5].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", metavar="N", help="KV heads to keep (gqa).", rich_help_panel=BUDGET)
    ] = None,
    kv_lora_rank: Annotated[
        int | None,
        typer.Option(
            "--kv-lora-rank",
            metavar="N",
            help="Rank of the latent; with --rope-dim in place of a ratio.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    rope_dim: Annotated[
        str | None,
        typer.Option(
            "--rope-dim",
            "--qk-rope-head-dim",
            metavar="N|auto",
            help="Rotated numbers per token; auto (default) tries several splits.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            help="fisher (default); mla: transmla, mha2mla; gqa: kv-heads, procrustes, mean-pool.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    rope_frequencies: Annotated[
        str | None,
        typer.Option(
            "--rope-frequencies",
            help="free (default), or grid: default RoPE, which every engine loads.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    freqfold: Annotated[
        int | None,
        typer.Option(
            "--freqfold",
            metavar="N",
            help="Frequencies folded into one (transmla) [tries several].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    allocate: Annotated[
        str | None,
        typer.Option(
            "--allocate", help="uniform ranks (default), or spectrum: per layer, own class.", rich_help_panel=BUDGET
        ),
    ] = None,
    fit_steps: Annotated[
        int | None,
        typer.Option(
            "--fit-steps",
            metavar="N",
            help="Least-squares steps after the closed form; 0 for none [3].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    carrier: Annotated[
        str | None,
        typer.Option(
            "--carrier",
            help="auto (default: stock where it can), stock (deepseek_v3) or own (class of this package).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    latent_norm: Annotated[
        str | None,
        typer.Option(
            "--latent-norm",
            help="How stock's latent norm is neutralised: auto (default), tiny or constant.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Largest weight file [5GB].", rich_help_panel=OUTPUT),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing checkpoint.", rich_help_panel=OUTPUT)
    ] = False,
    calibration: CalibrationOption = None,
    calibration_tokens: TokensOption = None,
    calibration_length: LengthOption = None,
    text_field: FieldOption = None,
    recall: Annotated[
        float | None,
        typer.Option(
            "--recall", metavar="F", help="Share of sequences with planted recalls [0.5].", rich_help_panel=CALIBRATION
        ),
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            "--held-out",
            metavar="N",
            help="Held-out sequences for choices and the report [8].",
            rich_help_panel=CALIBRATION,
        ),
    ] = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    batch_size: BatchOption = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="YAML of settings; flags win over it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print what it would do and take; write nothing.")
    ] = False,
    allow_pickle: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint's attention and write the result beside it.

    Examples:

        surgery convert --to mla ckpt/

        surgery convert --to mla ckpt/ --kv-ratio 0.125 --out small/ --device cuda

        surgery convert --to mla org/name --kv-lora-rank 512 --rope-dim 64 --rope-frequencies grid

        surgery convert --to gqa ckpt/ --kv-heads 4
    """
    from surgery.console import show_conversion, show_plan
    from surgery.progress import Progress
    from surgery.targets import find_target

    target = find_target(to)
    given = {
        "method": method,
        "kv_ratio": kv_ratio,
        "kv_heads": kv_heads,
        "kv_lora_rank": kv_lora_rank,
        "rope_dim": _rope_dim(rope_dim),
        "rope_frequencies": rope_frequencies,
        "freqfold": freqfold,
        "fit_steps": fit_steps,
        "allocate": allocate,
        "carrier": carrier,
        "latent_norm": latent_norm,
        "calibration": calibration,
        "calibration_tokens": calibration_tokens,
        "calibration_length": calibration_length,
        "text_field": text_field,
        "recall": recall,
        "held_out": held_out,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "batch_size": batch_size,
        "max_shard_size": max_shard_size,
    }
    settings = target.settings(given, config)
    if dry_run:
        plan = target.plan(checkpoint, out, settings, overwrite=overwrite, allow_pickle=allow_pickle)
        show_plan(plan, as_json=as_json)
        return
    conversion = target.convert(
        checkpoint,
        out,
        settings,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        command=shlex.join(["surgery", *sys.argv[1:]]),
        progress=Progress(),
    )
    show_conversion(conversion, as_json=as_json)


@app.command()
def inspect(
    checkpoint: CheckpointArgument,
    calibration: CalibrationOption = None,
    calibration_tokens: TokensOption = None,
    calibration_length: LengthOption = None,
    text_field: FieldOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    batch_size: BatchOption = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Where to draw the spectra (png, svg, pdf) [CKPT-spectra.png]."),
    ] = None,
    allow_pickle: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a checkpoint's attention, its KV bytes and what it can be converted to.

    With --calibration also how compressible it is: the share of the loss-weighted KV energy that fits in each rank.

    Examples:

        surgery inspect ckpt/

        surgery inspect ckpt/ --calibration builtin --plot spectra.png
    """
    from surgery.console import show_inspection
    from surgery.inspection import inspect_checkpoint
    from surgery.progress import Progress
    from surgery.settings import ConvertSettings

    given = {
        "calibration": calibration,
        "calibration_tokens": calibration_tokens,
        "calibration_length": calibration_length,
        "text_field": text_field,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "batch_size": batch_size,
    }
    settings = ConvertSettings(**{name: value for name, value in given.items() if value is not None})
    inspection = inspect_checkpoint(
        checkpoint,
        settings,
        spectra=calibration is not None,
        allow_pickle=allow_pickle,
        progress=Progress(),
    )
    show_inspection(inspection, plot=plot, as_json=as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the converted demo model.")] = Path(
        "surgery-demo"
    ),
    kv_ratio: Annotated[
        float, typer.Option("--kv-ratio", metavar="F", help="Share of the KV bytes per token to keep.")
    ] = 0.25,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert the built-in 5.5M-parameter model, load the result with stock transformers and compare.

    Example:

        surgery demo
    """
    from surgery.demo import run_demo

    run_demo(out, kv_ratio=kv_ratio, overwrite=overwrite, as_json=as_json)


cli_evaluation.register(app)

bench = typer.Typer(help="Measure time and memory.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("convert")
def bench_convert(
    shape: Annotated[str, typer.Option("--shape", help="llama3-8b, llama2-7b or llama3-1b.")] = "llama3-8b",
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where checkpoints are made; both stay there.")
    ] = Path("surgery-bench"),
    calibration: CalibrationOption = "none",
    kv_ratio: Annotated[
        float, typer.Option("--kv-ratio", metavar="F", help="Share of the KV bytes per token to keep.")
    ] = 0.28125,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint of random weights in a real model's shape; report time and peak memory.

    Example:

        surgery bench convert --shape llama3-8b --dir /data/bench
    """
    from surgery.bench import measure_conversion
    from surgery.console import show_bench
    from surgery.progress import Progress

    arguments = ["--calibration", calibration or "none", "--kv-ratio", str(kv_ratio)]
    arguments += ["--device", device] if device else []
    show_bench(measure_conversion(shape, folder, arguments, Progress()), as_json=as_json)


def _rope_dim(value: str | None) -> int | None:
    if value in (None, "auto"):
        return None
    try:
        return int(value)
    except ValueError:
        raise SurgeryError(f"--rope-dim {value}: give a number or auto") from None


def main() -> None:
    """Entry point: one line and exit code 1 for bad input, 2 for a wrong command line, 130 for Ctrl-C."""
    try:
        app()
    except SurgeryError as error:
        print(f"surgery: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("surgery: interrupted, nothing was written", file=sys.stderr)
        sys.exit(130)
