"""Dry run of ``surgery heal``, from the models' shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from surgery.checkpoint import check_output
from surgery.checkpoint.disk import as_json, free_bytes
from surgery.checkpoint.output_path import default_output
from surgery.checkpoint.staging import Staging
from surgery.common.progress import Progress
from surgery.healing.heal import HealRequest, training_settings, with_teacher
from surgery.healing.launchers import count_processes, is_sharded
from surgery.model import register
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import attention_dtype
from surgery.running.source_check import open_source
from surgery.running.unfused import language_model
from surgery.structures.base import LONG
from surgery.structures.dry_run import measure_speed
from surgery.structures.estimates import seconds_of
from surgery.training.estimate import config_of, estimate
from surgery.training.preparation import COMPUTED, PRECISIONS


@dataclass(frozen=True)
class HealingPlan:
    """Dry run of a healing, as JSON values: settings, estimate, disk bytes of the result and checkpoints, and work.

    ``kv_bytes_per_token`` is the student's, which healing leaves unchanged. ``work`` is FLOPs, FLOP/s of this machine
    and estimated seconds; None if a launcher may use other machines or only time limits the run.
    """

    student: str
    out: str
    settings: dict[str, Any]
    kv_bytes_per_token: float
    estimate: dict[str, Any]
    disk: dict[str, int]
    work: dict[str, float | None]


def plan_healing(request: HealRequest) -> HealingPlan:
    """Plan `heal_checkpoint` for a request from the models' configs, without training or writing.

    Raises SurgeryError: the request is impossible.
    """
    register()
    student = open_source(request.student)
    request = with_teacher(request, student, Progress(silent=True))
    out = request.out or default_output(request.student, "healed")
    check_output(student.source, out)
    Staging(out, overwrite=request.overwrite)
    settings = training_settings(request, student, out)
    processes = count_processes(request.processes, request.launcher)
    device = torch.device("cuda" if settings.on_gpu() else "cpu")
    if settings.dtype == "auto":  # resolved like the training does, if it runs on this machine
        can = device.type == "cuda" and torch.cuda.is_bf16_supported()
        settings = replace(settings, dtype="bf16" if can else "fp32")
    configs = [
        None if path is None else config_of(open_source(path), settings)
        for path in (settings.student, settings.teacher)
    ]
    costs = estimate(*configs, settings, processes, sharded=is_sharded(request.launcher))
    rate = None
    if request.launcher is None:
        one = measure_speed(device, COMPUTED[PRECISIONS[settings.dtype]])
        rate = one * (processes if device.type == "cuda" else 1)  # processes share the CPU
    seconds = seconds_of(costs.total_flops, rate)
    if settings.max_seconds is not None:
        seconds = min(settings.max_seconds, seconds or settings.max_seconds)
    decoder = language_model(student)
    weights = sum(student.info(name).nbytes for name in student.names())
    # Trainable weights and two moments in fp32; a new checkpoint is written before the oldest is removed.
    checkpoints = (settings.keep_last + 1) * 12 * costs.parameters["trained"]
    return HealingPlan(
        settings.student,
        str(out),
        as_json(settings.to_dict()),
        kv_bytes_of(decoder.config, attention_dtype(decoder))(LONG) / LONG,
        costs.to_dict(),
        {"output_bytes": weights, "checkpoint_bytes": checkpoints, "free_bytes": free_bytes(out.absolute().parent)},
        {"total_flops": costs.total_flops, "flops_per_second": rate, "estimated_seconds": seconds},
    )
