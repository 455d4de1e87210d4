"""Evaluation: runs all tasks on all rows, resumes interrupted runs and builds the report."""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from surgery.checkpoint.output_path import output_lock
from surgery.common.errors import SurgeryError
from surgery.common.human import duration
from surgery.common.progress import Progress
from surgery.common.wandb_service import check_wandb
from surgery.eval.memory import free_memory
from surgery.eval.report.document import SCHEMA, Report, finish
from surgery.eval.session import ComparingTask, Session, Task
from surgery.eval.variants.cache_hook import NoVariant
from surgery.evaluation.kinds import plugin_errors
from surgery.evaluation.models import cast, tokenizer_sha256
from surgery.evaluation.preparation import EvaluationRequest, Prepared, prepare
from surgery.evaluation.rows import ModelRow, plan_variants
from surgery.evaluation.settings import EvalSettings
from surgery.evaluation.store import ResultStore, key_of
from surgery.evaluation.tasks import Tasks
from surgery.reporting.report import environment
from surgery.running.equal_widths import use_equal_widths
from surgery.running.overflow import overflow
from surgery.running.processes import Processes
from surgery.running.source import process_device
from surgery.version import __version__


@dataclass(frozen=True)
class Evaluation:
    """Finished evaluation: report, folder and files written there; `is_main` is true on the main process."""

    report: Report
    folder: Path
    is_main: bool
    written: list[Path]


def evaluate(request: EvaluationRequest, progress: Progress) -> Evaluation:
    """Run an evaluation. Every process returns the same report; the main process writes it if requested.

    Raises SurgeryError: a model or task cannot be measured, raised before the first measurement if possible; or another
    evaluation is running in the folder.
    """
    processes = Processes(cpu=request.settings.device == "cpu")
    if not processes.is_main:
        progress = Progress(silent=True)
    device = process_device(request.settings.device, processes)
    prepared = prepare(request, progress)
    with ExitStack() as stack:
        store = processes.from_main(lambda: _opened_store(prepared, request, stack))
        report = _run_rows(prepared, request, store, processes, progress, device)
        paths = []
        if request.writes and processes.is_main:
            from surgery.evaluation.output import write_report  # imports matplotlib

            if not request.overwrite and (missing := prepared.variants_without(report)):
                progress.note(f"no longer in the report: {', '.join(missing)}; add them to --variants to keep them")
            paths = write_report(report, prepared.out)
    return Evaluation(report, prepared.out, processes.is_main, paths)


def _run_rows(
    prepared: Prepared,
    request: EvaluationRequest,
    store: ResultStore,
    processes: Processes,
    progress: Progress,
    device: torch.device,
) -> Report:
    settings, rows, tasks, baseline = prepared.settings, prepared.rows, prepared.tasks, prepared.baseline
    session = Session(
        prepared.tokenizer,
        processes,
        progress,
        batch_size=settings.batch_size,
        seed=settings.seed,
        limit=settings.limit,
    )
    work = _RowRunner(store, session, device, settings, tasks, baseline)

    def measure(row: ModelRow, position: str) -> dict[str, Any]:
        with progress.at(position):
            return work.measure(row, position)

    measured, began = [], time.monotonic()
    for number, row in enumerate(rows, 1):
        measured.append(measure(row, f"{number} of {len(rows)}"))
        if number < len(rows) and work.measured:
            pace = (time.monotonic() - began) / work.measured
            progress.note(f"about {duration(pace * (len(rows) - number))} left for the other models")
    if baseline is not None and settings.variants:
        held_bytes = {entry["name"]: entry["kv"]["held_bytes"] for entry in measured}
        ratios = [held_bytes[row.name] / held_bytes[baseline.name] for row in prepared.checkpoints]
        variants, notes = plan_variants(settings.variants, baseline.checkpoint, ratios, tasks.context)
        for note in notes:
            progress.note(note)
        for number, row in enumerate(variants, 1):
            try:
                measured.append(measure(row, f"variant {number} of {len(variants)}"))
            except NoVariant as reason:
                progress.note(f"no {row.name}: {reason}")
    report = {
        "schema": SCHEMA,
        "surgery_version": __version__,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": request.command,
        "title": request.title or ", ".join(row.name for row in prepared.checkpoints) or rows[0].name,
        "settings": {
            **settings.to_dict(),
            "context": tasks.context,
            "dtype": work.dtype_setting,
            "device": device.type,
        },
        "environment": {**environment(), **_machine(device, processes)},
        "tokenizer": {"sha256": tokenizer_sha256(prepared.tokenizer)},
        "tasks": tasks.settings,
        "baseline": baseline.name if baseline else None,
        "rows": measured,
    }
    # Through JSON, so that the returned report equals the report read from the file.
    return finish(json.loads(json.dumps(report, allow_nan=False)))


@dataclass
class _RowRunner:
    """Runner of all tasks on a row; loads a model only if results are missing.

    Attributes:
        references: what comparing tasks keep of the baseline, by task.
        measured: number of rows with a new measurement.
    """

    store: ResultStore
    session: Session
    device: torch.device
    settings: EvalSettings
    tasks: Tasks
    baseline: ModelRow | None
    references: dict[str, Any] = field(default_factory=dict)
    measured: int = 0

    @property
    def dtype_setting(self) -> str:
        """Dtype of quality measurements, "auto" for the checkpoint's."""
        return self.settings.quality_dtype(self.device.type)

    def measure(self, row: ModelRow, position: str) -> dict[str, Any]:
        """Return the row's entry in the report; `position` is its position in the progress output, such as "1 of 3"."""
        self.session.progress.note(f"{row.name} ({position}):")
        keys = {task.name: self._key(row, task) for task in self.tasks.all}
        stored = self.session.processes.from_main(lambda: {name: self.store.get(key) for name, key in keys.items()})
        missing = [task for task in self.tasks.all if stored[task.name] is None]
        if len(missing) < len(stored):
            names = [name for name in stored if stored[name] is not None]
            self.session.progress.note(f"  measured before: {', '.join(names)}")
        if missing:
            self.measured += 1
            comparing = [task for task in missing if self._compares(row, task)]
            if comparing and any(task.name not in self.references for task in comparing):
                # All results of the baseline were stored, so it has not been loaded yet.
                self._keep_baseline(comparing)
            model = row.load(self.device)
            for task in sorted(missing, key=lambda task: not task.native):
                stored[task.name] = self._run(row, model, task, keys[task.name])
            if row.role == "baseline":
                self._keep(model, [task for task in self.tasks.all if isinstance(task, ComparingTask)])
            model_class = type(model).__name__
            del model
            free_memory()
        else:
            model_class = stored["kv"]["class"]
        results = {name: stored[name]["result"] for name in stored if name != "kv"}
        return {
            "name": row.name,
            "role": row.role,
            "path": row.checkpoint.source_name,
            "sha256": row.checkpoint.sha256,
            "class": model_class,
            "dtype": row.checkpoint.dtype,
            "variant": row.variant,
            "kv": stored["kv"]["result"],
            "conversion": row.checkpoint.conversion() if row.variant is None else None,
            "results": results,
            "seconds": {name: stored[name]["seconds"] for name in stored},
        }

    def _run(self, row: ModelRow, model: PreTrainedModel, task: Task, key: str) -> dict[str, Any]:
        if not task.native:
            if self.dtype_setting != "auto":
                cast(model, getattr(torch, self.dtype_setting))
            if self.device.type == "cpu" and row.variant is None:  # variants replace the attention
                use_equal_widths(model)
        processes = self.session.processes
        start = time.perf_counter()
        try:
            reference = self.references.get(task.name) if self._compares(row, task) else None
            with plugin_errors(task.name, self.tasks.plugins.get(task.name)):
                result = task.run(model, self.session, reference)
                processes.from_main(lambda: _check_finite(row, task.name, result))
        except torch.OutOfMemoryError:
            raise SurgeryError(
                f"{row.name}, task {task.name}: out of memory; use a smaller --batch-size or --length"
            ) from None
        entry = {"result": result, "seconds": time.perf_counter() - start, "class": type(model).__name__}
        if processes.is_main:
            self.store.put(key, entry)
        processes.wait()
        return entry

    def _compares(self, row: ModelRow, task: Task) -> bool:
        return self.baseline is not None and row.role != "baseline" and isinstance(task, ComparingTask)

    def _keep_baseline(self, tasks: Sequence[ComparingTask]) -> None:
        model = self.baseline.load(self.device)
        if self.dtype_setting != "auto":
            cast(model, getattr(torch, self.dtype_setting))
        self._keep(model, tasks)
        del model
        free_memory()

    def _keep(self, model: PreTrainedModel, tasks: Sequence[ComparingTask]) -> None:
        for task in tasks:
            with plugin_errors(task.name, self.tasks.plugins.get(task.name)):
                self.references[task.name] = task.keep(model, self.session)

    def _key(self, row: ModelRow, task: Task) -> str:
        settings = self.settings
        facts = {
            "model": row.identity(),
            "task": task.name,
            "settings": self.tasks.settings[task.name],
            "seed": settings.seed,
            "limit": settings.limit,
            "batch_size": settings.batch_size,
            "dtype": "checkpoint" if task.native else self.dtype_setting,
            "device": self.device.type,
            "baseline": self.baseline.identity() if self._compares(row, task) else None,
            "versions": {name: environment()[name] for name in ("torch", "transformers")},
            "surgery": __version__,
        }
        if task.name in self.tasks.plugins:  # without the entry for others, so that their keys stay as they were
            facts["plugin"] = self.tasks.plugins[task.name]
        return key_of(facts)


def _check_finite(row: ModelRow, task: str, result: Any) -> None:
    try:
        json.dumps(result, allow_nan=False)
    except ValueError:
        raise overflow(row.checkpoint.reader, f"results of {row.name}, task {task},") from None


def _opened_store(prepared: Prepared, request: EvaluationRequest, stack: ExitStack) -> ResultStore:
    if request.settings.wandb:
        check_wandb(request.settings.wandb_mode, connect=True)
    store = ResultStore.open(prepared.out)
    stack.enter_context(output_lock(prepared.out))
    if request.restart:
        store.clear()
    if not request.overwrite:
        prepared.check_report()
    if request.writes:
        from surgery.evaluation.output import check_report_files  # imports matplotlib

        check_report_files(prepared.out)
    return store


def _machine(device: torch.device, processes: Processes) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "device_name": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "processes": processes.count,
        "threads": torch.get_num_threads(),
    }
