"""Check of the names in a recipe's steps (steps, checkpoints, pattern and plan files) before the first step runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surgery.checkpoint.location import existing, find_local
from surgery.checkpoint.named_models import BUILTIN, SMOLLM2
from surgery.common.errors import SurgeryError
from surgery.common.file_settings import did_you_mean
from surgery.workflow.steps import Step

MAKE_CHECKPOINTS = ("convert", "slice", "heal")
MAKE_PATTERNS = ("heads",)
MAKE_PLANS = ("plan",)
CHECKPOINTS = {
    "plan": ("source",),
    "convert": ("source",),
    "slice": ("source",),
    "heads": ("source",),
    "heal": ("student", "teacher"),
    "eval": ("baseline", "checkpoints"),
}
"""Settings of each command that name a checkpoint or a list of checkpoints."""

PATTERNS = {"plan": ("heads",), "convert": ("heads",)}
PLANS = {"convert": ("plan",)}
"""Settings of each command that name pattern files and plan files."""


def check_names(path: Path, steps: Sequence[Step]) -> None:
    """Check every name that a step uses: an earlier step, a named model, a file, a folder or a hub id.

    Raises SurgeryError: a name is none of these, or is a later step.
    """
    outputs: dict[str, str] = {}
    for number, step in enumerate(steps):
        where, later = f"{path}, step {step.name}", [other.name for other in steps[number:]]
        for name in _named(step, CHECKPOINTS):
            if not (outputs.get(name) in MAKE_CHECKPOINTS or name in (BUILTIN, SMOLLM2)):
                try:
                    find_local(name)
                except SurgeryError as error:
                    raise SurgeryError(f"{where}: {_explain(name, outputs, later) or error}") from None
        for what, settings, makers in (("pattern", PATTERNS, MAKE_PATTERNS), ("plan", PLANS, MAKE_PLANS)):
            for name in _named(step, settings):
                if not (outputs.get(name) in makers or ((path := existing(name)) and path.is_file())):
                    raise SurgeryError(f"{where}: {_explain(name, outputs, later) or f'{name}: no such {what} file'}")
        outputs[step.name] = step.command


def used(step: Step) -> list[str]:
    """Return the names of checkpoints, patterns and plans that a step uses."""
    return [name for settings in (CHECKPOINTS, PATTERNS, PLANS) for name in _named(step, settings)]


def _named(step: Step, settings: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the names in these settings of a step; of an evaluation's `ROW=NAME` the part after the sign."""
    names = []
    for setting in settings.get(step.command, ()):
        value = step.settings.get(setting)
        names += value if isinstance(value, list) else [] if value is None else [value]
    return [str(name).partition("=")[2] or str(name) if step.command == "eval" else str(name) for name in names]


def _explain(name: str, outputs: dict[str, str], later: list[str]) -> str | None:
    """Explain an unresolved name by the steps of the recipe; None if it resembles none."""
    if name in later:
        return f"{name} is not an output of an earlier step; reorder the steps"
    if name in outputs:
        return f"{name} is a {outputs[name]} step, whose output cannot be used here"
    hint = did_you_mean(name, list(outputs))
    return f"{name}: neither an earlier step nor an existing folder{hint}" if hint else None
