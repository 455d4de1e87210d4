"""``surgery plan``: choice of a conversion for a budget. Torch is imported inside the command only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from surgery.cli.generated import OptionValues
from surgery.cli.options import (
    OUTPUT,
    CheckpointArgument,
    ConfigOption,
    JsonOption,
    RestartOption,
    check_launcher,
    flag,
    option,
)
from surgery.common.errors import SurgeryError
from surgery.common.file_settings import read_mapping
from surgery.common.ownership import check_file
from surgery.common.pictures import check_picture
from surgery.planning.settings import PlanSettings


def plan_(
    checkpoint: CheckpointArgument,
    options: OptionValues,
    out: Annotated[
        Path | None, option("--out", "FILE", "File to write the chosen conversion to, for convert --plan.", OUTPUT)
    ] = None,
    plot: Annotated[Path | None, option("--plot", "FILE", "Draw loss against bytes (png, svg, pdf).", OUTPUT)] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an earlier plan and picture.", OUTPUT)] = False,
    restart: RestartOption = False,
    dry_run: Annotated[
        bool, flag("--dry-run", "Only list the candidates with their bytes, and estimate the time; write nothing.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose a conversion for a memory limit, a KV ratio or a loss limit, by simulating candidates on held-out text.

    It writes the choice only; surgery convert --plan runs it.

    Examples:

        surgery plan ckpt/ --memory 8GiB --context 32k --batch 16 --out plan.yaml

        surgery plan ckpt/ --memory 8GiB --context 32k --batch 16 --dry-run

        surgery convert ckpt/ --plan plan.yaml

        surgery plan ckpt/ --kv-ratio 0.25 --engine vllm

        surgery plan ckpt/ --max-loss 0.02 --allow lowrank,quantized,bits --plot plan.png
    """
    check_launcher()
    from surgery.checkpoint.named_models import find_model

    from_options = options.of(PlanSettings)
    settings = PlanSettings.from_mapping({**(read_mapping(config) if config else {}), **from_options}, "plan")
    source = find_model(checkpoint)
    for file, name in ((out, "--out"), (plot, "--plot")):
        if file is not None:
            check_file(file, overwrite=overwrite, option=name)
    if plot is not None:
        check_picture(plot)
    for file in (out, plot):
        if file is not None and not os.access(file.parent, os.W_OK):
            raise SurgeryError.at(file, "cannot be written; create the folder, or make it writable")

    if dry_run:
        from surgery.console.planning import show_forecast
        from surgery.planning.dry_run import forecast_plan

        forecast = forecast_plan(source, settings, called=checkpoint)
        show_forecast(forecast, as_json=as_json)
        return

    from surgery.common.progress import Progress
    from surgery.console.planning import show_plan_of_budget
    from surgery.planning.picture import save
    from surgery.planning.plan import make_plan
    from surgery.planning.plan_file import write_plan

    output = {"out": out, "restart": restart}
    plan = make_plan(source, settings, called=checkpoint, **output, progress=Progress())
    if out is not None:
        write_plan(plan, out)
    if plot is not None:
        save(plan, plot)
    show_plan_of_budget(plan, out, plot, as_json=as_json)
