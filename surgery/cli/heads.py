"""The verb ``heads``: scoring KV heads, and comparing the patterns that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.generated import Given, with_settings
from surgery.cli.options import (
    OUTPUT,
    CheckpointArgument,
    ConfigOption,
    JsonOption,
    PickleOption,
    RestartOption,
    command_line,
    flag,
    option,
)
from surgery.cli.verbs import VerbsWithDefault
from surgery.common.errors import SurgeryError
from surgery.heads.settings import SUFFIX, CompareRequest, HeadSettings

heads = typer.Typer(
    cls=VerbsWithDefault,
    help="Score KV heads: which need their whole context, and which can stream. `surgery heads CKPT` scores.",
    no_args_is_help=True,
)


def score(
    checkpoint: CheckpointArgument,
    given: Given,
    out: Annotated[
        Path | None,
        option("--out", "FILE", "Pattern to write; a picture goes beside it. [CKPT-heads-METHOD.safetensors]", OUTPUT),
    ] = None,
    config: ConfigOption = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an existing file.", OUTPUT)] = False,
    allow_pickle: PickleOption = False,
    restart: RestartOption = False,
    as_json: JsonOption = False,
) -> None:
    """Score every KV head of a checkpoint: the higher, the more it needs its whole context.

    Writes a pattern file for `surgery convert --to hybrid`, and a heat map beside it. An interrupted scoring goes on
    where it was. Processes of `torchrun -m surgery heads CKPT` or `accelerate launch` share
    the work.

    Examples:

        surgery heads ckpt/ --method duo

        surgery heads ckpt/ --method needle --sinks 16 --window 112 --length 1024 --out needle.safetensors
    """
    from surgery.checkpoint.named_models import find_model, model_named, output_of
    from surgery.heads.place import check_pattern, default_pattern

    asked = given.of(HeadSettings)
    settings = HeadSettings.from_file(config, **asked) if config else HeadSettings(**asked)
    called, out = checkpoint, output_of(checkpoint, out, f"heads-{settings.method}{SUFFIX}")
    # Before torch is loaded for it: places that would be refused later.
    check_pattern(out.expanduser() if out else default_pattern(model_named(called), settings.method), overwrite)
    checkpoint = find_model(called)

    from surgery.common.progress import Progress
    from surgery.console.heads import show_pattern
    from surgery.heads.scoring import score_heads

    anew = {"overwrite": overwrite, "restart": restart}
    scored = score_heads(checkpoint, out, settings, **anew, allow_pickle=allow_pickle, progress=Progress())
    if scored.is_main:
        show_pattern(scored, called, as_json=as_json)


heads.command()(with_settings(score, {"heads": HeadSettings}))


def compare(
    patterns: Annotated[
        list[str],
        typer.Argument(
            metavar="PATTERN...", help="Pattern files of ours, DuoAttention's or PruLong's; or NAME=FILE for each."
        ),
    ],
    given: Given,
    out: Annotated[Path, option("--out", "DIR", "Folder for tables and pictures.", OUTPUT)] = Path("heads-compare"),
    overwrite: Annotated[bool, flag("--overwrite", "Replace an earlier comparison.", OUTPUT)] = False,
    restart: RestartOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare patterns: overlap at several budgets, rank correlation, ties, a heat map of each.

    With --measure also what each is worth: recall and loss of a model by the share of its heads that stream. An
    interrupted measuring goes on where it was.

    Examples:

        surgery heads compare a.safetensors b.safetensors

        surgery heads compare duo=a.safetensors b.safetensors --measure ckpt/ --shares 0.5,0.75
    """
    from surgery.checkpoint.location import existing
    from surgery.checkpoint.named_models import find_model

    for pattern in patterns:
        if existing(pattern) is None and existing(path := pattern.rpartition("=")[2]) is None:
            raise SurgeryError(f"{path}: no such file; name a pattern that `surgery heads` wrote")
    asked = given.of(CompareRequest)
    if measure := asked.get("measure"):
        asked["measure"] = find_model(measure)
    command = command_line()
    request = CompareRequest(tuple(patterns), out, overwrite=overwrite, restart=restart, command=command, **asked)

    from surgery.common.progress import Progress
    from surgery.console.heads import show_comparison
    from surgery.heads.compare import compare_patterns

    comparison = compare_patterns(request, Progress())
    if comparison.is_main:
        show_comparison(comparison, as_json=as_json)


heads.command()(with_settings(compare, {"compare": CompareRequest}))
