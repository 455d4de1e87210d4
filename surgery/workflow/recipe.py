"""Recipe files: a list of steps, each with the settings of a command, which ``surgery run`` runs in order.

    name: two-ratios
    steps:
      - convert: {source: org/name, name: half, to: mla, kv_ratio: 0.5}
      - convert: {source: org/name, name: quarter, to: mla, kv_ratio: 0.25}
      - eval: {name: report, baseline: org/name, checkpoints: [half, quarter], tasks: [loss, recall]}

Steps of the commands:

- `convert`, `slice`: write a checkpoint to the work folder under the step's name, by which later steps refer to it.
  `plan` of a `convert` step names a `plan` step or a plan file.
- `plan`: chooses a conversion for a budget.
- `heads`: writes a pattern, which `heads` of a `convert` or `plan` step may name.
- `heal`: trains a `student` with its `teacher`. `processes` is the number of processes; `launcher` an accelerate config
  or the name of a shipped one. `measure` holds settings of the evaluation of source, student and result; `measure:
  false` skips it.
- `eval`: may have a `title`, and `publish`, a second folder for its report, without the results that it resumes from.

`builtin` is the demo model, `smollm2` a small real one. Steps that were completed with the same source and settings are
skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import did_you_mean, read_mapping
from surgery.common.human import count
from surgery.common.interruption import resumes_from
from surgery.common.progress import Progress
from surgery.common.removed import removal
from surgery.workflow.conversions import convert, plan, slice_
from surgery.workflow.names import check_names
from surgery.workflow.steps import Action, Expected, Finished, Step, checkpoint_of, located, pop_required

if TYPE_CHECKING:
    from surgery.evaluation.preparation import EvaluationRequest
    from surgery.heads.settings import HeadSettings
    from surgery.healing.heal import HealRequest


@dataclass(frozen=True)
class Recipe:
    """Parsed recipe file."""

    path: Path
    name: str
    steps: tuple[Step, ...]

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read a recipe; `checked_recipe` checks the settings of its steps.

        Raises SurgeryError: the file cannot be read, has an unknown command, or two steps with one name.
        """
        content = read_mapping(path)
        for key in content:
            if key not in ("name", "steps"):
                raise SurgeryError.at(path, f"unknown entry {key!r}{did_you_mean(str(key), ['name', 'steps'])}")
        listed = content.get("steps")
        if not isinstance(listed, list) or not listed:
            raise SurgeryError.at(path, "no steps; see recipes/testbed-report.yaml")
        steps = tuple(_step(path, number, entry) for number, entry in enumerate(listed, 1))
        names = [step.name for step in steps]
        for name in names:
            if names.count(name) > 1:
                raise SurgeryError.at(path, f"duplicate step name {name}; rename one")
        name = str(content.get("name", path.stem))
        _check_plain(name, str(path))
        return cls(path, name, steps)

    def where(self, step: Step) -> str:
        """Return the position of a step, for messages."""
        return f"{self.path}, step {step.name}"


def checked_recipe(path: Path) -> tuple[Recipe, list[Action]]:
    """Read a recipe and create its actions; settings and names of all steps are checked before the first one runs.

    Raises SurgeryError: a setting or a name is invalid.
    """
    recipe = Recipe.read(path)
    ready = [COMMANDS[step.command](step, recipe.where(step)) for step in recipe.steps]
    check_names(path, recipe.steps)
    return recipe, ready


def run_recipe(path: Path, work: Path | None, progress: Progress, *, restart: bool = False) -> Finished:
    """Run all steps of a recipe.

    Args:
        work: folder for the outputs; None for a folder with the recipe's name in the current directory.
        restart: restart interrupted steps from scratch; completed steps are kept.

    Raises:
        SurgeryError: the recipe is invalid (before any step runs), another process uses the folder, or a step fails.
    """
    recipe, ready = checked_recipe(path)
    work = work or Path(recipe.name)
    finished = Finished(restart=restart)

    from surgery.checkpoint.disk import disk_errors
    from surgery.checkpoint.output_path import output_lock

    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    with output_lock(work, "--work"):
        resumes_from(work)
        for number, (step, action) in enumerate(zip(recipe.steps, ready, strict=True), 1):
            progress.note(f"step {number} of {len(recipe.steps)}: {step.command} {step.name}")
            # A fresh progress: each step's report states the seconds of its own phases.
            with progress.at(f"step {number} of {len(recipe.steps)}"), located(recipe.where(step)):
                action.do(work / step.name, finished, progress.fresh())
    return finished


def _evaluate(step: Step, where: str) -> Action:
    from surgery.evaluation.settings import EvalSettings

    values = dict(step.settings)
    checkpoints, baseline = pop_required(values, "checkpoints", where), values.pop("baseline", None)
    publish, title = values.pop("publish", None), values.pop("title", None)
    if not isinstance(checkpoints, list):
        raise SurgeryError(f"{where}: checkpoints must be a list")
    settings = EvalSettings.from_mapping(values, where)

    def request_for(out: Path, finished: Finished) -> EvaluationRequest:
        from surgery.evaluation.preparation import EvaluationRequest

        rows = tuple(_row(name, finished) for name in checkpoints)
        compared = None if baseline is None else _row(baseline, finished)
        further = {"writes": True, "restart": finished.restart, "overwrite": True}
        return EvaluationRequest(rows, compared, out, settings, command=f"surgery run {where}", title=title, **further)

    def forecast(out: Path, finished: Finished, outline: Path) -> Expected:
        from surgery.evaluation.dry_run import plan_evaluation

        dry_run = plan_evaluation(request_for(out, finished), Progress(silent=True))
        peak = max(row["weights"] + (row["cache"] or 0) for row in dry_run.rows)
        return Expected(
            note=", ".join(dry_run.tasks), **{"host" if dry_run.settings["device"] == "cpu" else "device": peak}
        )

    def do(out: Path, finished: Finished, progress: Progress) -> None:
        from surgery.evaluation.output import track, write_report
        from surgery.evaluation.run import evaluate

        evaluation = evaluate(request_for(out, finished), progress)
        finished.report = evaluation.report
        finished.written = evaluation.written
        if publish is not None:
            finished.written += write_report(evaluation.report, Path(publish))
        if settings.wandb:
            track(evaluation.report, out, settings.wandb, settings.wandb_mode)

    return Action(do, forecast)


def _score_heads(step: Step, where: str) -> Action:
    from surgery.heads.settings import HeadSettings

    values = dict(step.settings)
    source = pop_required(values, "source", where)
    settings = HeadSettings.from_mapping(values, where)

    def do(out: Path, finished: Finished, progress: Progress) -> None:
        from surgery.heads.scoring import score_heads

        checkpoint = checkpoint_of(source, finished)
        path = finished.patterns[step.name] = out.with_name(f"{out.name}.safetensors")
        if _scored_already(path, checkpoint, settings):
            progress.note(f"{path}: is there already")
            return
        score_heads(checkpoint, path, settings, progress=progress)

    return Action(do)


def _heal(step: Step, where: str) -> Action:
    from surgery.common.wandb_service import check_wandb
    from surgery.healing.launchers import check_processes, find_launcher
    from surgery.training.settings import HealSettings

    values = dict(step.settings)
    student, teacher = pop_required(values, "student", where), pop_required(values, "teacher", where)
    processes, launcher = values.pop("processes", None), values.pop("launcher", None)
    measure = _measure(values.pop("measure", True), where)
    settings = HealSettings.from_mapping({**values, "teacher": teacher}, where)
    with located(where):
        check_processes(processes)
        launcher = None if launcher is None else find_launcher(str(launcher))
        if settings.wandb is not None:
            check_wandb(settings.wandb_mode)

    def request_for(out: Path, finished: Finished) -> HealRequest:
        from surgery.healing.heal import HealRequest

        return HealRequest(
            checkpoint_of(student, finished),
            out,
            overrides={**values, "teacher": checkpoint_of(teacher, finished)},
            processes=processes,
            launcher=launcher,
            measure=measure,
            restart=finished.restart,
            command=f"surgery run {where}",
        )

    def forecast(out: Path, finished: Finished, outline: Path) -> Expected:
        from surgery.healing.dry_run import plan_healing

        request = request_for(out, finished)
        dry_run = plan_healing(request)
        finished.checkpoints[step.name] = Path(request.student)  # the result has the same shapes
        tokens = dry_run.estimate["tokens"]
        return Expected(
            seconds=dry_run.work["estimated_seconds"],
            disk=dry_run.disk["output_bytes"],
            temporary=dry_run.disk["checkpoint_bytes"],
            note=f"{count(tokens)} tokens" if tokens else "",
            **{"device" if launcher or _on_gpu(settings.device) else "host": dry_run.estimate["peak_bytes"]},
        )

    def do(out: Path, finished: Finished, progress: Progress) -> None:
        from surgery.healing.heal import heal_unless_done

        finished.checkpoints[step.name] = out
        heal_unless_done(request_for(out, finished), progress)

    return Action(do, forecast)


def _on_gpu(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()


def _measure(value: Any, where: str) -> dict[str, Any] | None:
    """Return the evaluation settings of a healing: the defaults for true, None (no evaluation) for false."""
    from surgery.evaluation.settings import EvalSettings

    if isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, dict):
        raise SurgeryError(f"{where}: measure must be true, false or settings of an evaluation, not {value!r}")
    for name in set(value) & {"tasks", "variants"}:
        raise SurgeryError(f"{where}: measure does not support {name}, only loss and recall; use an eval step")
    EvalSettings.from_mapping(value, where)
    return value


COMMANDS: dict[str, Callable[[Step, str], Action]] = {
    "plan": plan,
    "convert": convert,
    "slice": slice_,
    "heads": _score_heads,
    "heal": _heal,
    "eval": _evaluate,
}


def _step(path: Path, number: int, entry: Any) -> Step:
    where = f"{path}, step {number}"
    if not isinstance(entry, dict) or len(entry) != 1:
        raise SurgeryError(
            f"{where}: must be one command with its settings, such as `convert: {{source: ..., name: ...}}`"
        )
    ((command, settings),) = entry.items()
    if notice := removal(str(command)):
        raise SurgeryError(f"{where}: {command} {notice}")
    if command not in COMMANDS:
        raise SurgeryError(f"{where}: unknown command {command!r}{did_you_mean(str(command), list(COMMANDS))}")
    if not isinstance(settings, dict):
        raise SurgeryError(f"{where}: {command} is empty; add its settings")
    settings = dict(settings)
    name = str(pop_required(settings, "name", where))
    _check_plain(name, where)
    return Step(command, name, settings)


def _check_plain(name: str, where: str) -> None:
    """Raise SurgeryError for an output name that is hidden or leaves the work folder."""
    if Path(name).name != name or name.startswith(".") or not name:
        raise SurgeryError(f"{where}: name {name!r} must be a plain file name")


def _row(text: str, finished: Finished) -> str:
    """Resolve a row of an evaluation, ``name=checkpoint`` or a step's name for both."""
    name, sign, checkpoint = str(text).partition("=")
    if not sign:
        name = checkpoint = str(text)
    model = checkpoint_of(checkpoint, finished)
    return f"{name}={model}" if sign or model != checkpoint else checkpoint


def _scored_already(path: Path, source: str, settings: HeadSettings) -> bool:
    """Return whether the pattern file exists for this source and these settings.

    Raises SurgeryError: it exists for another model or other settings.
    """
    from surgery.checkpoint import CheckpointReader
    from surgery.heads.pattern import HeadPattern
    from surgery.heads.scoring import sequence_length

    if not path.exists():
        return False
    pattern, reader = HeadPattern.load(path), CheckpointReader.open(source)
    expected = {**settings.to_dict(), "length": sequence_length(settings, reader.config)}
    same = expected.items() <= dict(pattern.settings).items()  # earlier versions had more settings
    if not same or pattern.model.get("sha256") != reader.fingerprint():
        raise SurgeryError.at(
            path, "was made from another model or with other settings; remove it, or choose another --work folder"
        )
    return True
