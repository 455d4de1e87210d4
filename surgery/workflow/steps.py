"""Steps of a recipe, and their results, which later steps use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress


@dataclass(frozen=True)
class Step:
    """Step of a recipe: a command and its settings by name."""

    command: str
    name: str
    settings: dict[str, Any]


@dataclass
class Finished:
    """Results of a recipe: paths of checkpoints, patterns and plans by step, and the last report with its files.

    ``restart`` is the argument of `surgery.workflow.recipe.run_recipe`.
    """

    checkpoints: dict[str, Path] = field(default_factory=dict)
    patterns: dict[str, Path] = field(default_factory=dict)
    plans: dict[str, Path] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    written: list[Path] = field(default_factory=list)
    restart: bool = False


@dataclass(frozen=True)
class Expected:
    """Forecast of a step from the dry run of its command. Sizes are in bytes; None is unknown.

    Attributes:
        host, device: peak memory of the machine and of its accelerator.
        disk, temporary: bytes of the output and of temporary files.
        note: text next to the numbers, or in their place.
    """

    seconds: float | None = None
    host: int | None = None
    device: int | None = None
    disk: int | None = None
    temporary: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Action:
    """Executable step with checked settings.

    ``forecast`` runs the command's dry run, if it has one. Its arguments are the output path, the expected results of
    earlier steps, to which it adds its own, and a folder that it may create for an outline.
    """

    do: Callable[[Path, Finished, Progress], None]
    forecast: Callable[[Path, Finished, Path], Expected] | None = None


@contextmanager
def located(where: str) -> Iterator[None]:
    """Begin the messages of errors in the block with a recipe and a step; their classes and fields stay."""
    try:
        yield
    except SurgeryError as error:
        if not str(error).startswith(where):
            error.args = (f"{where}: {error}",)
        raise


def pop_required(settings: dict[str, Any], name: str, where: str) -> Any:
    """Remove a setting from ``settings`` and return it. Raises SurgeryError: the setting is missing."""
    try:
        return settings.pop(name)
    except KeyError:
        raise SurgeryError(f"{where}: {name} is missing") from None


def checkpoint_of(name: str, finished: Finished) -> str:
    """Resolve the name of an earlier step or a named model to a path; return other paths and hub ids unchanged."""
    from surgery.checkpoint.named_models import model_named

    return str(finished.checkpoints[name]) if name in finished.checkpoints else model_named(name)
