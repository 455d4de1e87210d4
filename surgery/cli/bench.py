"""``surgery bench``: benchmarks of kernels and decoding."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from surgery.bench.settings import KernelRequest
from surgery.cli.commands import CommandGroup
from surgery.cli.generated import OptionValues, with_settings
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


def bench_kernels(
    options: OptionValues,
    out: OutOption = Path("surgery-bench"),
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check every kernel against float64, then time it next to the GPU's limits and PyTorch's kernels.

    Kernels that fail the check are not timed. Without a GPU only correctness is checked, at tiny shapes. The exit code
    is 1 if a kernel fails.

    Examples:

        surgery bench kernels --shapes llama3-8b --contexts 8k,128k --batches 1,32

        surgery bench kernels --operations mla_decode --no-baselines
    """
    from surgery.bench.kernels import measure_kernels
    from surgery.console.bench import show_kernels

    request = KernelRequest(**options.of(KernelRequest))
    check_file(out / "kernels.json", overwrite=overwrite)
    record, path = measure_kernels(request, out, command_line())
    show_kernels(record, path, as_json=as_json)
    if any(not row["gate"]["passed"] for row in record["rows"] if "gate" in row):
        raise typer.Exit(1)


bench.command("kernels")(with_settings(bench_kernels, {"kernels": KernelRequest}))


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
    growing: Annotated[
        bool, flag("--growing", "Caches grow with every step, as in `generate`, which copies plain keys and values.")
    ] = False,
    limit: LimitOption = None,
    out: OutOption = Path("surgery-bench"),
    overwrite: OverwriteOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure decoding of whole models, source and converted, with and without this package's kernels.

    Shapes get random weights. Caches are filled with random values up to the context, without a prefill, and stay at
    that length. Of several folders the first is the source of the others.

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
    from surgery.bench.kernels import sizes
    from surgery.console.bench import show_decoding
    from surgery.running.source import checked_device

    rows = tuple(None if word.strip() == "max" else sizes(word, "--batches")[0] for word in batches.split(","))
    settings = DecodeSettings(
        tuple(sizes(contexts, "--contexts")),
        rows,
        rank,
        rope_dim,
        tuple(name.strip() for name in to.split(",")),
        KERNELS[kernels],
        float("inf") if limit is None else limit,
        dtype,
        growing,
    )
    record = measure_decoding(
        models, settings, checked_device(device or "auto"), out=path, command=command_line(), say=_say
    )
    show_decoding(record, path, as_json=as_json)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
