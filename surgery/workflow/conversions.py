"""Recipe steps `plan`, `convert` and `slice`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError
from surgery.common.ownership import check_file
from surgery.common.progress import Progress
from surgery.workflow.steps import Action, Expected, Finished, Step, checkpoint_of, located, pop_required

if TYPE_CHECKING:
    from surgery.calibration.settings import ConversionSettings
    from surgery.planning.settings import PlanSettings
    from surgery.structures.registry import Target


def convert(step: Step, where: str) -> Action:
    """Create the action of a `convert` step, with its own settings or those of a plan."""
    from surgery.structures.registry import DEFAULT, find_target

    values = dict(step.settings)
    source = pop_required(values, "source", where)
    if "plan" in values:
        plan = str(values.pop("plan"))
        if "to" in values:
            raise SurgeryError(f"{where}: to is not allowed together with a plan, which sets it; remove to")
        return _conversion_action(
            step, source, lambda finished: _planned_settings(plan, values, finished, where), where
        )
    with located(where):
        target = find_target(str(values.pop("to", DEFAULT)))
    return _conversion_action(step, source, _choice_of(target, values, where), where)


def slice_(step: Step, where: str) -> Action:
    """Create the action of a `slice` step."""
    from surgery.structures.registry import SLICE

    values = dict(step.settings)
    return _conversion_action(step, pop_required(values, "source", where), _choice_of(SLICE, values, where), where)


Choice = Callable[[Finished], tuple["ConversionSettings", "Mapping[str, Any] | None"]]
"""Function from the results of earlier steps to a conversion's settings and a plan's prediction, if any."""


def _choice_of(target: Target, values: dict[str, Any], where: str) -> Choice:
    with located(where):
        settings = target.settings(values)
    return lambda finished: (settings, None)


def _planned_settings(plan: str, values: dict[str, Any], finished: Finished, where: str) -> tuple:
    from surgery.planning.plan_file import read_plan

    planned = read_plan(finished.plans.get(plan, Path(plan)))
    with located(where):
        return planned.target.settings({**planned.settings, **values}), planned.predicted


def _conversion_action(step: Step, source: str, choice: Choice, where: str) -> Action:
    def request_for(finished: Finished) -> tuple[ConversionSettings, Mapping[str, Any] | None]:
        settings, predicted = choice(finished)
        if (pattern := finished.patterns.get(getattr(settings, "heads", None))) is not None:
            settings = replace(settings, heads=str(pattern))
        return settings, predicted

    def do(out: Path, finished: Finished, progress: Progress) -> None:
        from surgery.structures.made_already import convert_unless_made
        from surgery.structures.request import ConversionRequest

        checkpoint = checkpoint_of(source, finished)
        finished.checkpoints[step.name] = out
        settings, predicted = request_for(finished)
        facts = {"command": f"surgery run {where}", "predicted": predicted, "restart": finished.restart}
        remedy = "remove it, or choose another --work folder"
        convert_unless_made(ConversionRequest(checkpoint, out, settings, **facts), progress, remedy=remedy)

    def forecast(out: Path, finished: Finished, outline: Path) -> Expected:
        from surgery.structures.dry_run import plan_conversion

        dry_run = plan_conversion(checkpoint_of(source, finished), out, request_for(finished)[0], outline=outline)
        if outline.exists():
            finished.checkpoints[step.name] = outline
        memory, disk = dry_run.memory, dry_run.disk
        return Expected(
            dry_run.work["estimated_seconds"],
            memory["host_bytes"],
            memory["device_bytes"],
            disk["output_bytes"],
            disk["temporary_bytes"],
            dry_run.refusal or "",
        )

    return Action(do, forecast)


def plan(step: Step, where: str) -> Action:
    """Create the action of a `plan` step."""
    from surgery.planning.settings import PlanSettings

    values = dict(step.settings)
    source = pop_required(values, "source", where)
    settings = PlanSettings.from_mapping(values, where)

    def do(out: Path, finished: Finished, progress: Progress) -> None:
        path = finished.plans[step.name] = out.with_name(f"{out.name}.yaml")
        plan_settings = settings
        if (pattern := finished.patterns.get(settings.heads)) is not None:
            plan_settings = replace(settings, heads=str(pattern))
        at = checkpoint_of(source, finished)
        _plan_unless_done(path, at, plan_settings, progress, restart=finished.restart)

    def forecast(out: Path, finished: Finished, outline: Path) -> Expected:
        from surgery.planning.dry_run import forecast_plan

        dry_run = forecast_plan(checkpoint_of(source, finished), settings)
        memory, seconds = dry_run.memory, dry_run.work["estimated_seconds"]
        return Expected(seconds, memory["host_bytes"], memory["device_bytes"], temporary=dry_run.temporary_bytes)

    return Action(do, forecast)


def _plan_unless_done(path: Path, source: str, settings: PlanSettings, progress: Progress, *, restart: bool) -> None:
    """Write the plan, with a JSON file of all measurements next to it, by which later runs recognize it.

    Raises SurgeryError: a plan for another source or other settings exists, or nothing meets the budget.
    """
    from surgery.checkpoint import CheckpointReader
    from surgery.checkpoint.disk import as_json, disk_errors, read_json, write_whole
    from surgery.planning.plan import make_plan
    from surgery.planning.plan_file import write_plan

    facts_path = path.with_suffix(".json")
    if path.exists():
        expected = {"sha256": CheckpointReader.open(source).fingerprint(), "settings": settings.to_dict()}
        expected = as_json(expected)
        if not facts_path.exists() or {name: read_json(facts_path).get(name) for name in expected} != expected:
            raise SurgeryError.at(
                path,
                "exists, but from another source or with other settings; remove it, or choose another --work folder",
            )
        progress.note(f"{path}: is there already")
        return
    check_file(facts_path, overwrite=False, option="--work")
    result = make_plan(source, settings, out=path, restart=restart, progress=progress)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    facts = {**result.to_dict(), "sha256": result.source["sha256"]}
    write_whole(facts_path, json.dumps(facts, indent=1) + "\n")
    write_plan(result, path)
