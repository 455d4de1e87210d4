"""``surgery convert --heal``: a conversion and the healing of its result in one command, with one output checkpoint.

The converted checkpoint and the training's files are in ``<out>.healing`` until the healed checkpoint is moved to
``out``. After an interruption the same command resumes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from surgery.calibration.settings import NO_CALIBRATION
from surgery.calibration.text import BUILTIN
from surgery.checkpoint import check_output
from surgery.checkpoint.output_path import output_lock
from surgery.checkpoint.staging import Staging
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.common.temporary import TemporaryFolder
from surgery.healing.dry_run import HealingPlan, plan_healing
from surgery.healing.heal import CONVERTED, HealRequest, heal_checkpoint, training_settings, work_folder_of
from surgery.model import register
from surgery.reporting.report import Report, read_report
from surgery.running.models import tokenizer_of
from surgery.running.source_check import open_source
from surgery.structures.converter import Conversion
from surgery.structures.dry_run import ConversionPlan, outline_result, plan_conversion
from surgery.structures.made_already import convert_unless_made
from surgery.structures.registry import target_of
from surgery.structures.request import ConversionRequest, open_request
from surgery.training.estimate import config_of

TRAINING: dict[str, Any] = {
    "length": 512,
    "batch_size": 1,
    "gradient_accumulation": 1,
    "learning_rate": 1e-4,
    "schedule": "linear",
    "objective": {"kl": 1.0, "hidden": 10.0},
    "recall": 0.5,
    "held_out": 0,
    "eval_every": None,
    "max_tokens": None,
}
"""Training settings that differ from the defaults of ``surgery heal``.

In training of minutes the number of steps matters most, and plain text recovers the loss before the recall: the demo
model as low rank at KV ratio 1/8, healed for 125 s, finds 73% of planted keys with the default objective and share of
recall, 88% with these settings (docs/healing.md). Tuned on the demo model; not tried on a larger one.
"""


def convert_and_heal(
    request: ConversionRequest,
    budget: Mapping[str, float],
    *,
    measure: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a model and heal the result.

    Args:
        request: see :func:`surgery.structures.converter.convert`.
        budget: ``max_seconds`` or ``max_steps`` of the training, without loading and measuring.
        measure: see :class:`surgery.healing.heal.HealRequest`.

    Returns:
        The healed checkpoint. The layers in its report are JSON values.

    Raises:
        SurgeryError: errors of a conversion or a healing; invalid healing settings are found before the conversion.
    """
    if "WORLD_SIZE" in os.environ:
        raise SurgeryError(
            "--heal trains in a process of its own: leave the launcher out, or convert and call surgery heal --launcher"
        )
    progress = progress or Progress(silent=True)
    out = _output_path(request)
    healing = _healing_request(request, out, budget, measure)
    with TemporaryFolder("outline") as folder:
        _check_healable(request, healing, Path(folder, CONVERTED))
    work = work_folder_of(healing.out)
    work.open()
    converted = work.path / CONVERTED
    with output_lock(work.path):
        if request.restart:
            work.clear()
        try:
            conversion = replace(request, out=converted, overwrite=False, restart=False)
            convert_unless_made(conversion, progress, remedy="pass --restart to discard it, or choose another --out")
        except SurgeryError:
            if not any(work.path.glob(f"{CONVERTED}*")):
                work.remove()
            raise
    heal_checkpoint(replace(healing, student=str(converted)), progress)
    return Conversion(healing.out, Report.of(read_report(healing.out)), str(request.source))


def plan_both(request: ConversionRequest, budget: Mapping[str, float]) -> tuple[ConversionPlan, HealingPlan | None]:
    """Plan `convert_and_heal` without running it; the healing of a vision-language model has no plan before conversion.

    Raises SurgeryError: the conversion or the healing is impossible.
    """
    healing = _healing_request(request, _output_path(request), budget, None)
    with TemporaryFolder("outline") as folder:
        outline = Path(folder, CONVERTED)
        options = {"overwrite": request.overwrite, "outline": outline}
        conversion = plan_conversion(request.source, healing.out, request.settings, **options)
        _check_healable(request, healing, outline)
        return conversion, plan_healing(replace(healing, student=str(outline))) if outline.exists() else None


def _output_path(request: ConversionRequest) -> Path:
    out = Path(request.out) if request.out else None
    return target_of(request.settings).check_paths(
        str(request.source), out, request.settings, overwrite=request.overwrite
    )


def _healing_request(
    request: ConversionRequest, out: Path, budget: Mapping[str, float], measure: Mapping[str, Any] | None
) -> HealRequest:
    """Build the request of the healing, with an empty student."""
    settings = request.settings
    text = settings.calibration
    is_own_text = text not in (BUILTIN, NO_CALIBRATION) and "=" not in text
    values = {"teacher": str(request.source), "seed": settings.seed, **TRAINING, **budget}
    values |= {"device": "cpu"} if settings.device == "cpu" else {}
    values |= {"data": ({"source": text, "text_field": settings.text_field},)} if is_own_text else {}
    return HealRequest(
        "",
        Staging(out, overwrite=request.overwrite).out,
        overrides=values,
        measure=measure,
        overwrite=request.overwrite,
        command=request.command,
    )


def _check_healable(request: ConversionRequest, healing: HealRequest, outline: Path) -> None:
    """Check that the result can be healed, with an outline: a checkpoint with its config and shapes only.

    Raises SurgeryError: the result could not be healed.
    """
    register()
    teacher = open_source(request.source)
    check_output(teacher.source, healing.out)
    tokenizer_of(teacher, remedy="--heal trains on text: use a checkpoint with a tokenizer, or leave --heal out")
    if not outline.exists():
        structure, _ = open_request(request, Progress(silent=True))
        outline_result(outline, structure)
    if outline.exists():
        try:
            student = open_source(outline)
            config_of(student, training_settings(healing, student, outline.parent))
        except SurgeryError as error:
            message = str(error).replace(str(outline), "the result")
            raise SurgeryError(f"--heal: {message}", setting=error.setting, hint=error.hint) from None
