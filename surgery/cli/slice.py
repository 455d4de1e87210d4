"""``surgery slice``: a smaller checkpoint from a converted one. Torch is imported inside the verb only."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import (
    BUDGET,
    OUTPUT,
    BatchOption,
    CheckpointArgument,
    DeviceOption,
    DtypeOption,
    JsonOption,
    OverwriteOption,
    ShardSizeOption,
)


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("slice")(slice_)


def slice_(
    checkpoint: CheckpointArgument,
    kv_ratio: Annotated[
        float,
        typer.Option("--kv-ratio", metavar="F", help="Share of the KV bytes of the model that it was converted from."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder to write [CKPT-sliced, beside it].", rich_help_panel=OUTPUT),
    ] = None,
    allocate: Annotated[
        str | None,
        typer.Option(
            "--allocate",
            help="Ranks of layers: spectrum, by what their latents are worth (default), or uniform.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    max_shard_size: ShardSizeOption = None,
    overwrite: OverwriteOption = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    batch_size: BatchOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a smaller checkpoint from a converted one, without calibration: the best latents come first.

    For what `convert --to lowrank`, `--to crosslayer` (cascade) and `--to mla` wrote.

    Example:

        surgery slice ckpt-lowrank/ --kv-ratio 0.125
    """
    from surgery.checkpoint.named_models import model_named
    from surgery.common.progress import Progress
    from surgery.console.conversion import show_conversion
    from surgery.structures.registry import SLICE

    given = {
        "kv_ratio": kv_ratio,
        "allocate": allocate,
        "max_shard_size": max_shard_size,
        "device": device,
        "dtype": dtype,
        "batch_size": batch_size,
    }
    settings, source = SLICE.settings(given), model_named(checkpoint)
    SLICE.check_places(source, out, settings, overwrite=overwrite)
    from surgery.structures import converter

    conversion = converter.convert(
        source,
        out,
        settings,
        overwrite=overwrite,
        command=shlex.join(["surgery", *sys.argv[1:]]),
        progress=Progress(),
    )
    show_conversion(conversion, as_json=as_json)
