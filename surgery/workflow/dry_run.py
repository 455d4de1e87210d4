"""Dry run of a recipe: the dry runs of its steps' commands in order.

The checkpoint of an earlier step is replaced by an outline in a temporary folder: its config and shapes. A step that
needs more (a slice needs the report; others a pattern or a plan that does not exist yet) gets no forecast before the
earlier step has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.common.temporary import TemporaryFolder
from surgery.workflow.names import MAKE_CHECKPOINTS, MAKE_PATTERNS, MAKE_PLANS, used
from surgery.workflow.recipe import Recipe
from surgery.workflow.steps import Action, Expected, Finished, located

ENDINGS = {**dict.fromkeys(MAKE_PATTERNS, ".safetensors"), **dict.fromkeys(MAKE_PLANS, ".yaml")}
MOST = ("host", "device", "temporary")
"""Amounts whose total is the maximum over steps; the totals of all others are sums."""


def plan_recipe(recipe: Recipe, actions: Sequence[Action], work: Path, progress: Progress) -> dict[str, Any]:
    """Forecast each step as JSON values (command, name, target, whether its output exists, costs), and the total.

    Raises SurgeryError: a step with existing inputs is impossible.
    """
    finished, outputs, steps = Finished(), {}, []
    results = {
        **dict.fromkeys(MAKE_CHECKPOINTS, finished.checkpoints),
        **dict.fromkeys(MAKE_PATTERNS, finished.patterns),
        **dict.fromkeys(MAKE_PLANS, finished.plans),
    }
    with TemporaryFolder("recipe") as folder, progress.phase("forecast", len(recipe.steps), "step") as advance:
        for step, action in zip(recipe.steps, actions, strict=True):
            out, adds = work / f"{step.name}{ENDINGS.get(step.command, '')}", results.get(step.command, {})
            earlier = [name for name in used(step) if name in outputs]
            if (exists := out.exists()) and step.command in results:  # a run keeps existing outputs
                adds[step.name], expected = out, Expected()
            elif action.forecast is None:
                expected = Expected(note="not estimated: has no dry run")
            elif unknown := [name for name in earlier if not outputs[name]]:
                expected = _after(unknown)
            else:
                try:
                    with located(recipe.where(step)):
                        expected = action.forecast(out, finished, folder / step.name)
                except SurgeryError:
                    outlined = [name for name in earlier if folder in finished.checkpoints.get(name, work).parents]
                    if not outlined:
                        raise
                    expected = _after(outlined)  # the error may be due to the outline
            outputs[step.name] = step.name in adds
            to = step.settings.get("to")
            steps.append({"command": step.command, "name": step.name, "to": to, "exists": exists, **asdict(expected)})
            advance()
    total = {name: [step[name] for step in steps if step[name]] for name in asdict(Expected()) if name != "note"}
    total = {name: max(each, default=0) if name in MOST else sum(each) for name, each in total.items()}
    return {"name": recipe.name, "work": str(work), "steps": steps, "total": total}


def _after(names: Sequence[str]) -> Expected:
    return Expected(note=f"known after {' and '.join(names)}")
