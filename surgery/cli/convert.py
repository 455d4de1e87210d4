"""``surgery convert``: a checkpoint from another. Torch is imported inside the verb only."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import (
    BUDGET,
    CALIBRATION,
    OUTPUT,
    BatchOption,
    CalibrationOption,
    CheckpointArgument,
    ConfigOption,
    DeviceOption,
    DtypeOption,
    FieldOption,
    JsonOption,
    KeepStatisticsOption,
    LengthOption,
    OverwriteOption,
    PickleOption,
    SeedOption,
    ShardSizeOption,
    TokensOption,
)
from surgery.common.errors import SurgeryError
from surgery.engines.limits import cache_dtype_flags


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(convert)


def convert(
    checkpoint: CheckpointArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="mla; gqa (fewer KV heads) or mqa (one), in the source's own class; lowrank; crosslayer; hybrid "
            "(streaming heads); quantized.",
        ),
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
            help="Share of the KV bytes per token to keep [0.25, gqa 0.5].",
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
            help="fisher (default); mla: transmla, mha2mla; gqa: kv-heads, procrustes, mean-pool, key-norm; lowrank: "
            "separate, svd-llm, asvd, cskv, palu, think; crosslayer: xkv (default), cascade, xkv-prompt, minicache.",
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
            "--allocate",
            help="Ranks, or KV heads (gqa), of layers: uniform, spectrum (by what is dropped) or greedy (measured; "
            "lowrank) [mla and gqa uniform, lowrank spectrum].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            metavar="N",
            help="Numbers per token and layer in place of a ratio (lowrank, crosslayer).",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    rank_multiple: Annotated[
        int | None,
        typer.Option(
            "--rank-multiple", metavar="N", help="Every rank is a multiple of it (lowrank) [1].", rich_help_panel=BUDGET
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size", metavar="N", help="Adjacent layers in a group (crosslayer) [3].", rich_help_panel=BUDGET
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            help="Recent tokens that stay exact (lowrank, crosslayer, quantized) [0].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(
            "--sinks",
            metavar="N",
            help="First tokens that stay exact (with --window or --bits) [0], or that streaming heads keep (hybrid) "
            "[the pattern's].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            "--heads",
            metavar="FILE",
            help="Pattern of `surgery heads`: which heads stay full (hybrid).",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    streaming: Annotated[
        float | None,
        typer.Option(
            "--streaming",
            metavar="F",
            help="Share of the heads that stream, in place of a ratio; 1 needs no pattern (hybrid).",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            help="Tokens at which --kv-ratio is counted (hybrid) [the model's limit].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    recent: Annotated[
        int | None,
        typer.Option(
            "--recent",
            metavar="N",
            help="Last tokens that streaming heads keep (hybrid) [the pattern's].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    compensated: Annotated[
        float | None,
        typer.Option(
            "--compensated",
            metavar="F",
            help="Share of the streaming heads that also read the mean of what they dropped (hybrid) [0].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    heads_multiple: Annotated[
        int | None,
        typer.Option(
            "--heads-multiple",
            metavar="N",
            help="Every layer's full heads are a multiple of it, for tensor parallelism (hybrid) [1].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(
            "--block",
            metavar="N",
            help="Tokens that stay exact until they are as many (crosslayer) [64].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            "--bits",
            metavar="8|4|2|fp8|auto",
            help="Of a cached number (quantized [4]); any other target then ends in a quantised cache, and its ratio "
            "counts numbers. auto: by latent, and the ratio counts bytes (lowrank).",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            "--group", metavar="N", help="Numbers that share a scale (with bits) [32].", rich_help_panel=BUDGET
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            "--keys",
            help="What shares a scale of keys or latents: the tokens of a channel, or the channels of a token "
            "(with bits) [channel].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    streaming_bits: Annotated[
        str | None,
        typer.Option(
            "--streaming-bits",
            metavar="8|4|2|fp8",
            help="Of what streaming heads keep, where a hybrid model is quantised [--bits].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    rope_bits: Annotated[
        str | None,
        typer.Option(
            "--rope-bits",
            metavar="16|8|4|2|fp8",
            help="Of the rotated numbers of a quantised MLA cache [--bits].",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    hadamard: Annotated[
        bool | None,
        typer.Option(
            "--hadamard",
            help="Fold a rotation into the weights that spreads outliers (with bits).",
            rich_help_panel=BUDGET,
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
            help="auto (default: stock where it can), stock (deepseek_v3; mla), own (class of this package) or decilm "
            "(gqa with heads by layer, for vLLM and llama.cpp).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="vllm|sglang|llama.cpp|mlx|all",
            help="Write what this engine carries, best within its limits (mla, gqa); quantized: name its own cache.",
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
    max_shard_size: ShardSizeOption = None,
    keep_statistics: KeepStatisticsOption = None,
    overwrite: OverwriteOption = False,
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
    held_out_text: Annotated[
        str | None,
        typer.Option(
            "--held-out-text",
            metavar="FILE|DATASET",
            help="Where they are from [other documents than the calibration's].",
            rich_help_panel=CALIBRATION,
        ),
    ] = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    batch_size: BatchOption = None,
    config: ConfigOption = None,
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

        surgery convert --to mla ckpt/ --engine vllm

        surgery convert --to gqa ckpt/ --kv-heads 4

        surgery convert --to lowrank ckpt/ --kv-ratio 0.125 --window 32 --sinks 4

        surgery convert --to crosslayer ckpt/ --kv-ratio 0.125 --group-size 4

        surgery convert --to hybrid ckpt/ --heads ckpt-heads-duo.safetensors --kv-ratio 0.4

        surgery convert --to lowrank ckpt/ --kv-ratio 0.5 --bits 4

        surgery convert --to quantized ckpt-lowrank/ --bits 4
    """
    from surgery.checkpoint.named_models import model_named, output_of
    from surgery.structures.registry import find_target

    target = find_target(to)
    if to == "quantized" and engine is not None:
        # Engines quantise plain caches by themselves; one of ours would load in none of them.
        print(f"nothing to convert, {engine} quantises its cache itself: {cache_dtype_flags(engine, _bits(bits) or 4)}")
        return
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
        "rank": rank,
        "rank_multiple": rank_multiple,
        "group_size": group_size,
        "window": window,
        "sinks": sinks,
        "block": block,
        "bits": _bits(bits),
        "streaming_bits": _bits(streaming_bits),
        "rope_bits": _bits(rope_bits),
        "heads": heads,
        "streaming": streaming,
        "context": context,
        "recent": recent,
        "compensated": compensated,
        "heads_multiple": heads_multiple,
        "group": group,
        "keys": keys,
        "hadamard": hadamard or None,
        "carrier": carrier,
        "latent_norm": latent_norm,
        "engine": engine,
        "calibration": calibration,
        "calibration_tokens": calibration_tokens,
        "calibration_length": calibration_length,
        "text_field": text_field,
        "recall": recall,
        "held_out": held_out,
        "held_out_text": held_out_text,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "batch_size": batch_size,
        "max_shard_size": max_shard_size,
        "keep_statistics": keep_statistics,
    }
    settings = target.settings(given, config)
    checkpoint, out = model_named(checkpoint), output_of(checkpoint, out, to)
    target.check_places(checkpoint, out, settings, overwrite=overwrite)

    from surgery.common.progress import Progress
    from surgery.console.conversion import show_conversion, show_plan

    if dry_run:
        from surgery.structures.dry_run import plan_conversion

        plan = plan_conversion(checkpoint, out, settings, overwrite=overwrite, allow_pickle=allow_pickle)
        show_plan(plan, as_json=as_json)
        return
    from surgery.structures import converter

    conversion = converter.convert(
        checkpoint,
        out,
        settings,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        command=shlex.join(["surgery", *sys.argv[1:]]),
        progress=Progress(),
    )
    show_conversion(conversion, as_json=as_json)


def _bits(value: str | None) -> int | str | None:
    return int(value) if value and value.isdigit() else value


def _rope_dim(value: str | None) -> int | None:
    if value in (None, "auto"):
        return None
    try:
        return int(value)
    except ValueError:
        raise SurgeryError(f"--rope-dim {value}: give a number or auto") from None
