"""Preparation of an evaluation, shared with its dry run: opening models, reading texts, checking names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.calibration.held_out_documents import default_names
from surgery.checkpoint.disk import as_json
from surgery.checkpoint.output_path import refuse_output_inside, working_output
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.common.wandb_service import check_wandb
from surgery.eval.report.document import Report, read_report
from surgery.evaluation.models import Checkpoint, tokenizer_sha256
from surgery.evaluation.rows import ModelRow, check_names
from surgery.evaluation.settings import EvalSettings
from surgery.evaluation.tasks import Tasks, build_tasks


@dataclass(frozen=True)
class EvaluationRequest:
    """Request for an evaluation.

    Attributes:
        checkpoints, baseline: folders or hub ids, optionally as NAME=CKPT.
        out: folder of results and report; None for the first checkpoint's name followed by "-eval".
        title: title of the report; None for the names of the checkpoints.
        writes: whether the report is written.
        restart: whether to discard results in the folder and measure again.
        overwrite: whether to replace a report of other models, tasks or settings.
    """

    checkpoints: tuple[str, ...]
    baseline: str | None
    out: Path | None
    settings: EvalSettings
    command: str = ""
    title: str | None = None
    writes: bool = False
    restart: bool = False
    overwrite: bool = False
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Prepared:
    """Prepared evaluation: settings with the resolved held-out text, and models, the baseline first."""

    settings: EvalSettings
    rows: list[ModelRow]
    tokenizer: PreTrainedTokenizerBase
    tasks: Tasks
    out: Path

    @property
    def baseline(self) -> ModelRow | None:
        """Baseline row; None without a baseline."""
        return next((row for row in self.rows if row.role == "baseline"), None)

    @property
    def checkpoints(self) -> list[ModelRow]:
        """Rows of the checkpoints, without the baseline."""
        return [row for row in self.rows if row.role == "checkpoint"]

    def check_report(self) -> None:
        """Raise SurgeryError if an existing report has other settings, or rows or tasks that would be lost."""
        out, rows, tasks = self.out, self.rows, self.tasks
        if not (out / "report.json").exists():
            return
        old = read_report(out)
        if changed := _changed_settings(old, self.settings, tasks):
            raise SurgeryError.at(
                out, f"its report has another {', '.join(changed)}; choose another --out or pass --overwrite"
            )
        missing = [name for name in old["tasks"] if name not in {task.name for task in tasks.all}]
        missing += [
            f"row {row['name']}"
            for row in old["rows"]
            if row["role"] != "variant" and row["sha256"] not in {r.checkpoint.sha256 for r in rows}
        ]
        if missing:
            raise SurgeryError.at(
                out,
                f"its report has {', '.join(missing)}, which the new one would not; choose another --out or say "
                "--overwrite",
            )

    def variants_without(self, report: Report) -> list[str]:
        """Return the names of cheap baselines that an existing report has and a new one lacks."""
        names = {row["name"] for row in report["rows"]}
        old = read_report(self.out)["rows"] if (self.out / "report.json").exists() else []
        return [row["name"] for row in old if row["role"] == "variant" and row["name"] not in names]


def prepare(request: EvaluationRequest, progress: Progress) -> Prepared:
    """Open and hash the models, read the texts and build the tasks, without measuring or writing anything.

    Raises SurgeryError: a model, text or task cannot be prepared.
    """
    settings = request.settings
    if settings.wandb:
        check_wandb(settings.wandb_mode)
    baseline, checkpoints = _open(request, progress)
    rows = [ModelRow(c.name, "baseline" if c is baseline else "checkpoint", c) for c in checkpoints]
    check_names(rows)
    tokenizer = _common_tokenizer(checkpoints)
    if not settings.data:
        settings = replace(settings, data=default_names(tokenizer))
        progress.note(f"held-out text: {' and '.join(settings.data)} (--data names another)")
    tasks = build_tasks(settings, tokenizer, checkpoints[0].reader.config, progress)
    main_row = next((row for row in rows if row.role == "checkpoint"), rows[0])
    beside = working_output(main_row.checkpoint.source, "eval")
    out = request.out or beside.with_name(f"{file_name(main_row.name)}-eval")
    for row in rows:
        refuse_output_inside(row.checkpoint.reader.source, out)
    return Prepared(settings, rows, tokenizer, tasks, out)


def file_name(text: str) -> str:
    """Make a safe file name: dashes replace special characters, separators included; "report" if nothing is left."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")[:80] or "report"


def _changed_settings(old: Report, settings: EvalSettings, tasks: Tasks) -> list[str]:
    """Return the names of the settings that determine results and differ from those of an old report."""
    changed = [name for name in ("seed", "limit") if old["settings"][name] != getattr(settings, name)]
    new = as_json(tasks.settings)
    for task in sorted(old["tasks"].keys() & new.keys()):
        before, now = old["tasks"][task], new[task]
        changed += [f"{name} of {task}" for name in {**before, **now} if before.get(name) != now.get(name)]
    return changed


def _open(request: EvaluationRequest, progress: Progress) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """Open baseline and checkpoints, the baseline first; checkpoints equal to the baseline are dropped."""
    models = [*([request.baseline] if request.baseline else []), *request.checkpoints]
    if not models:
        raise SurgeryError("nothing to evaluate: give a checkpoint folder or a hub id")
    opened = []
    with progress.phase("open and hash the weights", len(models), "model") as advance:
        for name in models:
            opened.append(Checkpoint.open(name, trust_remote_code=request.trust_remote_code))
            advance()
    baseline = opened[0] if request.baseline else None
    if baseline is not None:
        same = (baseline.sha256, baseline.config_sha256)
        opened = [baseline, *(c for c in opened[1:] if (c.sha256, c.config_sha256) != same)]
    return baseline, opened


def _common_tokenizer(checkpoints: Sequence[Checkpoint]) -> Any:
    tokenizer = checkpoints[0].tokenizer()
    expected = tokenizer_sha256(tokenizer)
    for checkpoint in checkpoints[1:]:
        if tokenizer_sha256(checkpoint.tokenizer()) != expected:
            raise SurgeryError(
                f"{checkpoint.name} has another tokenizer than {checkpoints[0].name}: losses over different "
                "tokens are not comparable; evaluate them separately"
            )
    return tokenizer
