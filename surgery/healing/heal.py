"""``surgery heal``: recovery training of a converted checkpoint, verified and measured.

The training is `surgery.training.heal`, launched as a subprocess with any accelerate config. This module prepares its
settings and command. Afterwards it verifies the trained checkpoint like a conversion's result, measures it next to its
source and student, and moves it to ``out`` with its report.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from surgery.architectures.lr_multipliers import lr_multipliers
from surgery.checkpoint import CheckpointReader, check_output
from surgery.checkpoint.disk import as_json, disk_errors, read_json
from surgery.checkpoint.file_hashes import hash_files
from surgery.checkpoint.file_kinds import CARD, HEALING, REPORT
from surgery.checkpoint.output_path import default_output, output_lock
from surgery.checkpoint.staging import Staging
from surgery.checkpoint.work_folder import WorkFolder
from surgery.common.errors import SurgeryError
from surgery.common.file_settings import read_mapping
from surgery.common.interruption import resumes_from
from surgery.common.ownership import inventory
from surgery.common.progress import Progress
from surgery.common.wandb_service import check_wandb
from surgery.engines.table import engine_table
from surgery.evaluation.run import EvaluationRequest, evaluate
from surgery.evaluation.settings import EvalSettings
from surgery.healing.launchers import (
    count_processes,
    ended,
    keeps_freed_memory,
    launch_command,
    outside,
    run_interruptible,
)
from surgery.healing.recorded_source import find_source
from surgery.healing.verification import verify_healed
from surgery.reporting.healing_table import check_healing, gap_closed, quality_table, stages
from surgery.reporting.report import Report, read_report, reading
from surgery.running.source_check import open_source
from surgery.training.models import check_writable
from surgery.training.settings import LEARNED_FROM, HealSettings
from surgery.verification.written import Verification

TRAINED, SETTINGS, FACTORS, FACTS = "trained", "heal.yaml", "entry_factors.json", "heal.json"
CONVERTED = "converted"
"""Folder of the student in the work folder, under ``surgery convert --heal``."""
EVALUATION = "evaluation"


@dataclass(frozen=True)
class HealRequest:
    """Request for a healing.

    Attributes:
        out: output folder; by default the student's name with the suffix "-healed".
        config: YAML file of :class:`surgery.training.settings.HealSettings`, which ``overrides`` override by name.
        processes: number of processes; None for the ``launcher``'s number, or 1 without a launcher.
        launcher: accelerate config file (`surgery.healing.launchers.find_launcher`).
        measure: evaluation settings by name for source, student and healed checkpoint; None skips the evaluation.
        restart: start from scratch instead of resuming an interrupted healing.
    """

    student: str
    out: Path | None = None
    config: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    processes: int | None = None
    launcher: Path | None = None
    measure: Mapping[str, Any] | None = field(default_factory=dict)
    overwrite: bool = False
    restart: bool = False
    command: str = ""


@dataclass(frozen=True)
class Healed:
    """A healed checkpoint, and the ``healing`` section of its report.

    The section's "table" has rows for source, conversion and result, with those of earlier healing stages ("earlier");
    "gap_closed" covers all stages, and "quality" holds the measurements of this stage. ``teacher`` is None without one.
    """

    path: Path
    healing: dict[str, Any]
    teacher: str | None = None


def heal_checkpoint(request: HealRequest, progress: Progress | None = None) -> Healed:
    """Train, verify, measure and write a checkpoint. The same request resumes an interrupted healing.

    The training's files are in ``<out>.healing`` until the healing is finished. Raises SurgeryError: the request is
    impossible, another process heals into the same output, the training failed, or its result does not pass
    verification.
    """
    progress = progress or Progress(silent=True)
    student = open_source(request.student)
    _earlier(student.path)  # damaged records raise before the training
    request = with_teacher(request, student, progress)
    out = request.out or default_output(request.student, "healed")
    check_output(student.source, out)
    staging = Staging(out, overwrite=request.overwrite)
    work_folder = work_folder_of(staging.out)
    work = work_folder.path
    settings = training_settings(request, student, work, staging.out)
    if settings.wandb is not None:
        check_wandb(settings.wandb_mode)
    work_folder.open()
    resumes_from(work / f"{TRAINED}.run" / "checkpoints")
    with output_lock(work):
        if request.restart:
            run = work / f"{TRAINED}.run"
            with output_lock(run) if run.is_dir() else nullcontext():
                work_folder.clear()
        healing = _healed(request, settings, student, staging, work, progress)
        if not work_folder.remove():
            progress.note(f"{work}: not removed, because it holds files that surgery did not write")
    return Healed(staging.out, healing, settings.teacher)


def _healed(
    request: HealRequest,
    settings: HealSettings,
    student: CheckpointReader,
    staging: Staging,
    work: Path,
    progress: Progress,
) -> dict[str, Any]:
    steps = 2 if request.measure is None else 3
    if not _trained_already(work, settings):
        with progress.step(1, steps):
            _train(request, settings, student, work, progress)
    trained = work / TRAINED
    facts = json.loads((trained / FACTS).read_text(encoding="utf-8"))
    with progress.step(2, steps):
        verification = verify_healed(CheckpointReader.open(trained), student, settings, progress)
    with progress.step(3, steps):
        quality = _quality(request, settings, trained, work, progress)
    healing = {
        "command": request.command,
        **{name: facts[name] for name in KEPT},
        "settings": _without_paths(facts["settings"]),
        "verification": {
            "cached_decode_difference": verification.cache_difference,
            "kv_bytes_per_token": verification.kv_bytes_per_token,
            "kv_tokens": verification.kv_tokens,
        },
        "quality": quality,
        "left_out": facts.get("left_out"),
        "earlier": _earlier(trained),
    }
    healing["table"] = quality_table(healing)
    healing["gap_closed"] = gap_closed(healing["table"])
    staging.create()
    try:
        with disk_errors(staging.partial):
            shutil.copytree(trained, staging.partial, dirs_exist_ok=True)
            _write_report(staging.partial, healing, verification, staging.out.name)
        staging.commit()
    except BaseException:
        staging.discard()
        raise
    return healing


def work_folder_of(out: Path) -> WorkFolder:
    """Return the work folder of a healing, ``<out>.healing``: settings, the training's output and run folder, the
    evaluation, and the converted checkpoint of ``surgery convert --heal``."""
    outputs = (name for folder in (TRAINED, CONVERTED) for name in (folder, f"{folder}.partial"))
    return WorkFolder(out.with_name(f"{out.name}.healing"), (SETTINGS, FACTORS, *outputs, f"{TRAINED}.run", EVALUATION))


def with_teacher(request: HealRequest, student: CheckpointReader, progress: Progress) -> HealRequest:
    """Return the request with the student's recorded source as teacher, unless teacher, logits or objective are set.

    A custom objective may need no teacher; the default objective would silently become cross-entropy without one.
    Raises SurgeryError: the source cannot be found.
    """
    values = {**(read_mapping(request.config) if request.config else {}), **request.overrides}
    if any(values.get(name) for name in LEARNED_FROM):
        return request
    teacher = find_source(student)
    progress.note(f"teacher: {teacher}, which the student's report names as its source")
    return replace(request, overrides={**request.overrides, "teacher": str(teacher)})


KEPT = ("steps", "sequences_per_step", "tokens", "seconds", "tokens_per_second", "peak_memory_bytes", "ended", "loss")
KEPT += ("held_out", "parameters", "precision", "device", "processes", "document_masks", "data", "versions")
KEPT += ("measuring_seconds", "wandb", "tracker_failed")
UNRECORDED = ("student", "teacher", "teacher_logits", "out", "entry_factors", "overwrite", "tracker_folder")


def training_settings(
    request: HealRequest, student: CheckpointReader, work: Path, out: Path | None = None
) -> HealSettings:
    """Build the training settings of a request, with files in ``work``, and the tracker's next to ``out``.

    Raises SurgeryError: a setting is unknown or impossible.
    """
    read = read_mapping(request.config) if request.config else {}
    settings = HealSettings.from_mapping({**read, **request.overrides}, str(request.config or "heal"))
    check_writable(student)
    factors = work / FACTORS if lr_multipliers(student) and not settings.entry_factors else settings.entry_factors
    return replace(
        settings,
        student=str(student.source.absolute()),
        teacher=_teacher(settings),
        out=str(work / TRAINED),
        entry_factors=None if factors is None else str(factors),
        overwrite=True,
        tracker_folder=settings.tracker_folder or str((out or work).with_name(f"{(out or work).name}.tracking")),
    )


def _teacher(settings: HealSettings) -> str | None:
    if settings.teacher is None:
        return None
    return str(open_source(settings.teacher, trust_remote_code=settings.trust_remote_code).source.absolute())


def heal_unless_done(request: HealRequest, progress: Progress) -> None:
    """Heal, or print a note if the output exists with the same settings and may not be overwritten.

    Raises SurgeryError: as :func:`heal_checkpoint` and :func:`is_already_healed`.
    """
    if request.overwrite or not is_already_healed(request):
        heal_checkpoint(request, progress)
    else:
        progress.note(f"{request.out}: is there already")


def is_already_healed(request: HealRequest) -> bool:
    """Return whether the output exists, healed from the same student and teacher with the same settings.

    Settings that are newer than the output count as their defaults; settings that were removed since are ignored.
    Raises SurgeryError: the output exists with another student, teacher or settings.
    """
    out = request.out or default_output(request.student, "healed")
    if not out.exists():
        return False
    student = CheckpointReader.open(request.student)
    expected = training_settings(request, student, out)
    try:
        recorded = json.loads((out / FACTS).read_text(encoding="utf-8"))
        same = recorded["student_sha256"] == student.fingerprint()
        if expected.teacher is not None:
            same = same and recorded["teacher_sha256"] == CheckpointReader.open(expected.teacher).fingerprint()
        same = same and recorded["processes"] == count_processes(request.processes, request.launcher)
        values = as_json(expected.with_batches(recorded["processes"]).to_dict())
        settings = as_json(HealSettings().to_dict()) | recorded["settings"]
        same = same and _without_paths({name: settings[name] for name in values}) == _without_paths(values)
    except (OSError, ValueError, KeyError):
        same = False
    if not same:
        raise SurgeryError.at(
            out, "was made from another student or with other settings; remove it, or choose another --out"
        )
    return True


def _without_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without paths and `overwrite`."""
    return {name: value for name, value in settings.items() if name not in UNRECORDED}


def _train(
    request: HealRequest, settings: HealSettings, student: CheckpointReader, work: Path, progress: Progress
) -> None:
    with disk_errors(work):
        if settings.entry_factors == str(work / FACTORS):
            (work / FACTORS).write_text(json.dumps(lr_multipliers(student), indent=1) + "\n", encoding="utf-8")
        config = work / SETTINGS
        config.write_text(yaml.safe_dump(as_json(settings.to_dict()), sort_keys=False), encoding="utf-8")
    command = launch_command(config, request.processes, request.launcher)
    progress.note(f"training: {shlex.join(command)}")
    environment = outside(dict(os.environ)) | {"TOKENIZERS_PARALLELISM": "false"}
    if not settings.on_gpu():
        environment = keeps_freed_memory(environment)
    code = run_interruptible(command, environment)
    if code:
        # A training that reports an error exits with 1; its message has the advice.
        advice = f"saved steps stay in {work}" if code == 1 else "run the same command to resume"
        raise SurgeryError(f"the training {ended(code)}, see above; {advice}")


def _trained_already(work: Path, settings: HealSettings) -> bool:
    """Return whether the work folder has a finished training with these settings."""
    try:
        facts = json.loads((work / TRAINED / FACTS).read_text(encoding="utf-8"))
        recorded, processes = dict(facts["settings"]), facts["processes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    values = as_json(settings.with_batches(processes).to_dict())
    return all(recorded.get(name) == value for name, value in values.items())


def _quality(
    request: HealRequest, settings: HealSettings, trained: Path, work: Path, progress: Progress
) -> list[dict[str, Any]]:
    """Measure loss and recall of the source (if there is a teacher), the student and the healed checkpoint."""
    if request.measure is None:
        return []
    rows = {"converted": settings.student, "healed": str(trained)}
    eval_settings = EvalSettings(
        **{"tasks": ("loss", "recall"), "decoded": 0, "variants": (), "device": settings.device, **request.measure}
    )
    evaluation = EvaluationRequest(
        tuple(f"{name}={path}" for name, path in rows.items()),
        None if settings.teacher is None else f"source={settings.teacher}",
        work / EVALUATION,
        eval_settings,
        command=request.command,
        overwrite=True,
    )
    report = evaluate(evaluation, progress).report
    return [
        {
            "name": row["name"],
            "loss": row["results"]["loss"]["loss"],
            "recall": (row["results"].get("recall") or {}).get("accuracy"),
        }
        for row in report["rows"]
    ]


def _earlier(folder: Path) -> list[dict[str, Any]]:
    """Return the records of earlier healing stages from a student's folder, as a flat list.

    Raises SurgeryError: a record is damaged.
    """
    before = (read_report(folder) or {}).get("healing")
    path = folder / HEALING
    if before is None and path.is_file():
        before = read_json(path)
        with reading(path):
            check_healing(before)
            before.pop("files", None)  # of that folder only
    return [{**stage, "earlier": []} for stage in stages(before)] if before else []


def _write_report(folder: Path, healing: dict[str, Any], verification: Verification, name: str) -> None:
    """Add the healing to the conversion's report and model card; without a report, write it to a separate file."""
    conversion = read_report(folder)
    if conversion is None:
        record = {**healing, "files": inventory(folder, [HEALING])}
        (folder / HEALING).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    target = {**conversion["target"], "engines": engine_table(config, name, folder)}
    record = {"files": hash_files(folder), "probe": verification.probe}
    report = {**conversion, **record, "target": target, "healing": healing}
    (folder / CARD).write_text(Report.of(report).card(name), encoding="utf-8")
    report["other_files"] = inventory(folder, [*record["files"], REPORT])
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
