"""``surgery bench``: the benchmark of decoding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.commands import CommandGroup
from surgery.cli.options import DeviceOption, JsonOption, command_line, flag, option
from surgery.common.errors import SurgeryError
from surgery.common.ownership import check_file

bench = typer.Typer(cls=CommandGroup, help="Measure time and memory.", no_args_is_help=True)

OutOption = Annotated[Path, option("--out", "DIR", "Folder for the records (JSON), written after each measurement.")]
OverwriteOption = Annotated[bool, flag("--overwrite", "Replace earlier records.")]
LimitOption = Annotated[
    float | None, option("--limit", "SECONDS", "Start no new measurement after this time. [no limit]")
]
DTYPES = ("auto", "bfloat16", "float16", "float32")
KERNELS = {"both": (False, True), "stock": (False,), "ours": (True,)}


@bench.command("decode")
def bench_decode(
    models: Annotated[
        list[str], typer.Argument(metavar="CKPT|SHAPE...", help="Folders, or llama2-7b, llama3-8b, llama3-1b.")
    ],
    to: Annotated[
        str, option("--to", "NAMES", "Targets that shapes are converted to: mla, mla-own, mla-bits, lowrank, gqa.")
    ] = "mla",
    rank: Annotated[int, option("--rank", "N", "Rank of the latent of converted shapes.")] = 512,
    rope_dim: Annotated[int, option("--rope-dim", "N", "Rotary dimensions next to it.")] = 64,
    contexts: Annotated[str, option("--contexts", "SIZES", "Tokens of the cache.")] = "8k,32k,128k",
    batches: Annotated[str, option("--batches", "SIZES", "Sequences at a time; max is as many as fit.")] = "1,8,max",
    kernels: Annotated[str, option("--kernels", "WORD", "stock, ours (accelerated), or both.")] = "both",
    dtype: Annotated[str, option("--dtype", "NAME", "Dtype of folders' weights; auto for the checkpoint's.")] = "auto",
    limit: LimitOption = None,
    out: OutOption = Path("surgery-bench"),
    overwrite: OverwriteOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure decoding of whole models, source and converted, with and without this package's kernels.

    Shapes get random weights. Caches are filled with random values up to the context, without a prefill. Of several
    folders the first is the source of the others.

    Examples:

        surgery bench decode llama3-8b --contexts 8k,128k --batches 1,max

        surgery bench decode ckpt/ ckpt-mla/ --contexts 32k --dtype bfloat16
    """
    from surgery.bench.shapes import is_shape

    for name in models:
        is_shape(name)  # raises for unknown shapes before torch is imported
    if kernels not in KERNELS:
        raise SurgeryError(f"--kernels {kernels}: choose {', '.join(KERNELS)}")
    if dtype not in DTYPES:
        raise SurgeryError(f"--dtype {dtype}: choose {', '.join(DTYPES)}")
    path = out / "decode.json"
    check_file(path, overwrite=overwrite)

    from surgery.bench.decode import DecodeSettings, measure_decoding
    from surgery.console.bench import show_decoding
    from surgery.running.source import checked_device

    rows = tuple(None if word.strip() == "max" else _number(word, "--batches") for word in batches.split(","))
    settings = DecodeSettings(
        tuple(_number(word, "--contexts") for word in contexts.split(",")),
        rows,
        rank,
        rope_dim,
        tuple(name.strip() for name in to.split(",")),
        KERNELS[kernels],
        float("inf") if limit is None else limit,
        dtype,
    )
    record = measure_decoding(
        models, settings, checked_device(device or "auto"), out=path, command=command_line(), say=_say
    )
    show_decoding(record, path, as_json=as_json)


def _number(word: str, option: str) -> int:
    """Parse a size such as 8 or 32k; k stands for 1024. Raises SurgeryError: no positive integer."""
    digits = word.strip().lower().removesuffix("k")
    if not digits.isdigit() or int(digits) < 1:
        raise SurgeryError(f"{option}: {word.strip()!r} is not a positive integer such as 8 or 32k")
    return int(digits) * (1 if word.strip().isdigit() else 1024)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
