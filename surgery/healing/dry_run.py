"""What ``surgery heal`` would take, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from surgery.checkpoint import check_output
from surgery.checkpoint.output_place import default_output
from surgery.checkpoint.staging import Staging
from surgery.common.progress import Progress
from surgery.healing.heal import HealRequest, plain, training_settings, with_teacher
from surgery.healing.launchers import count_processes, is_sharded
from surgery.model import register
from surgery.running.source_check import open_source
from surgery.structures.dry_run import measure_speed
from surgery.training.estimate import WIDTHS, estimate
from surgery.training.shapes import config_of


@dataclass(frozen=True)
class HealingPlan:
    """What a healing would take; plain values only.

    Attributes:
        settings: of the training.
        estimate: bytes and FLOPs (`surgery.training.estimate.Estimate`).
        time: the peak and the utilisation that were given, and the seconds they make; None without a peak.
    """

    student: str
    out: str
    settings: dict[str, Any]
    estimate: dict[str, Any]
    time: dict[str, float | None] | None


def plan_healing(
    request: HealRequest, peak_flops: float | None = None, utilisation: float = 0.4, *, here: bool = False
) -> HealingPlan:
    """Plans `heal_checkpoint` with the same request, from the models' configs: nothing is trained or written.

    Args:
        peak_flops, utilisation: of `Estimate.seconds`; without a peak there is no time.
        here: the peak is what a matrix product reaches on this machine, where no launcher names others.

    Raises:
        SurgeryError: the request is impossible, or the models cannot be followed on shapes alone.
    """
    register()
    student = open_source(request.student)
    request = with_teacher(request, student, Progress(silent=True))
    out = request.out or default_output(request.student, "healed")
    check_output(student.source, out)
    Staging(out, overwrite=request.overwrite)
    settings = training_settings(request, student, out)
    processes = count_processes(request.processes, request.launcher)
    device = torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")
    if settings.dtype == "auto":  # as the training will find it, if it runs here
        can = device.type == "cuda" and torch.cuda.is_bf16_supported()
        settings = replace(settings, dtype="bf16" if can else "fp32")
    if here and request.launcher is None:
        peak_flops = measure_speed(device, WIDTHS[settings.dtype])["flops_per_second"]
    configs = [
        None if path is None else config_of(open_source(path), settings)
        for path in (settings.student, settings.teacher)
    ]
    found = estimate(*configs, settings, processes, sharded=is_sharded(request.launcher))
    time = None
    if peak_flops is not None:
        seconds = found.seconds(peak_flops, utilisation)
        time = {"peak_flops": peak_flops, "utilisation": utilisation, "seconds": seconds}
    return HealingPlan(settings.student, str(out), plain(settings.to_dict()), found.to_dict(), time)
