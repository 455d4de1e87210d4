"""``surgery slice``: reduction of a converted checkpoint. Torch is imported inside the command only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from surgery.cli.generated import OptionValues
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
from surgery.structures.registry import SLICE


def slice_(
    checkpoint: CheckpointArgument,
    options: OptionValues,
    out: Annotated[Path | None, option("--out", "DIR", "Folder to write. [CKPT-sliced, next to it]", OUTPUT)] = None,
    overwrite: OverwriteOption = False,
    config: ConfigOption = None,
    restart: RestartOption = False,
    dry_run: DryRunOption = False,
    keep_code: KeepCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a smaller checkpoint from a converted one, without calibration: keep its most important latents.

    For results of `convert --to lowrank` and `--to mla` (custom model class), without bits.

    Example:

        surgery slice ckpt-lowrank/ --kv-ratio 0.125
    """
    check_launcher()
    from surgery.checkpoint.named_models import model_named
    from surgery.common.progress import Progress
    from surgery.console.conversion import show_conversion, show_plan

    settings, source = SLICE.settings(options.of(SLICE.settings_class), config), model_named(checkpoint)
    SLICE.check_paths(source, out, settings, overwrite=overwrite)
    if dry_run:
        from surgery.structures.dry_run import plan_conversion

        show_plan(plan_conversion(source, out, settings, overwrite=overwrite), checkpoint, as_json=as_json)
        return
    from surgery.structures import converter
    from surgery.structures.request import ConversionRequest

    request = ConversionRequest(
        source, out, settings, overwrite=overwrite, keep_code=keep_code, command=command_line(), restart=restart
    )
    show_conversion(converter.convert(request, progress=Progress()), as_json=as_json)
