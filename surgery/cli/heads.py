"""``surgery heads``: scores of KV heads. Torch is imported inside the command only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from surgery.cli.generated import OptionValues
from surgery.cli.options import (
    OUTPUT,
    CheckpointArgument,
    ConfigOption,
    JsonOption,
    check_launcher,
    flag,
    option,
)
from surgery.heads.settings import SUFFIX, HeadSettings


def score(
    checkpoint: CheckpointArgument,
    options: OptionValues,
    out: Annotated[
        Path | None,
        option(
            "--out",
            "FILE",
            "Pattern file to write, with a heat map next to it. [CKPT-heads-METHOD.safetensors]",
            OUTPUT,
        ),
    ] = None,
    config: ConfigOption = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an existing file.", OUTPUT)] = False,
    as_json: JsonOption = False,
) -> None:
    """Score every KV head of a checkpoint: the higher, the more it needs the full context.

    Writes a pattern file for `surgery convert --to hybrid`, and a heat map next to it.

    Examples:

        surgery heads ckpt/ --method duo

        surgery heads ckpt/ --method needle --sinks 16 --window 112 --length 1024 --out needle.safetensors
    """
    check_launcher()
    from surgery.checkpoint.named_models import find_model, model_named, output_of
    from surgery.heads.pattern_path import check_pattern, default_pattern

    from_options = options.of(HeadSettings)
    settings = HeadSettings.from_file(config, **from_options) if config else HeadSettings(**from_options)
    called, out = checkpoint, output_of(checkpoint, out, f"heads-{settings.method}{SUFFIX}")
    # Check the output path before torch is imported.
    check_pattern(out.expanduser() if out else default_pattern(model_named(called), settings.method), overwrite)
    checkpoint = find_model(called)

    from surgery.common.progress import Progress
    from surgery.console.heads import show_pattern
    from surgery.heads.scoring import score_heads

    scored = score_heads(checkpoint, out, settings, overwrite=overwrite, progress=Progress())
    show_pattern(scored, called, as_json=as_json)
