"""Step of a recipe, and the results that steps pass on to later ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress

if TYPE_CHECKING:
    from surgery.running.processes import Processes


@dataclass(frozen=True)
class Step:
    """One step: the command, and its settings by name."""

    verb: str
    name: str
    settings: dict[str, Any]


@dataclass
class Finished:
    """Results of a recipe: checkpoints, patterns and plans by step, and the last report with its files.

    ``restart`` is of `surgery.workflow.recipe.run_recipe`.
    """

    checkpoints: dict[str, Path] = field(default_factory=dict)
    patterns: dict[str, Path] = field(default_factory=dict)
    plans: dict[str, Path] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    written: list[Path] = field(default_factory=list)
    restart: bool = False


@dataclass(frozen=True)
class Expected:
    """Forecast of a step, from the dry run of its command; None where that gives no figure. Sizes in bytes.

    Attributes:
        host, device: memory at the most, of the machine and of its accelerator.
        disk, temporary: what is written, and what is gone in the end.
        told: what stands in the place of numbers, or next to them.
    """

    seconds: float | None = None
    host: int | None = None
    device: int | None = None
    disk: int | None = None
    temporary: int | None = None
    told: str = ""


@dataclass(frozen=True)
class Action:
    """A step whose settings were checked.

    Attributes:
        do: does it.
        forecast: says what it would take. It is given the output's place, what the steps before are expected to make,
            to which it adds its own, and a folder that it may make for that. None: the command has no dry run.
    """

    do: Callable[[Path, Finished, Progress, Processes], None]
    forecast: Callable[[Path, Finished, Path], Expected] | None = None


def pop_required(settings: dict[str, Any], name: str, where: str) -> Any:
    """Takes a setting out of others.

    Raises:
        SurgeryError: it is missing.
    """
    try:
        return settings.pop(name)
    except KeyError:
        raise SurgeryError(f"{where}: {name} is missing") from None


def checkpoint_of(name: str, finished: Finished) -> str:
    """A checkpoint's path or hub id: of an earlier step, of the demo model, or as it is given."""
    from surgery.checkpoint.named_models import model_named

    return str(finished.checkpoints[name]) if name in finished.checkpoints else model_named(name)
