"""Registry of evaluation tasks by their names in ``--tasks``; imports torch only when a task is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from surgery.common.plugins import Registry, load

if TYPE_CHECKING:
    from surgery.eval.session import Task
    from surgery.evaluation.task_data import TaskData

    Build = Callable[[TaskData], Task]

DEFAULT = ("loss", "recall", "needle", "ruler", "generate", "speed")
TASKS: Registry[str | Build] = Registry("tasks", {name: f"surgery.eval.tasks.{name}:build" for name in DEFAULT})
"""Functions that build a task from `TaskData`, or their import paths (module:name).

"all" selects `DEFAULT`, without the tasks of installed packages.
"""


def builder(name: str) -> Build:
    """Return the builder of a task."""
    build_path = TASKS[name]
    return load(build_path) if isinstance(build_path, str) else build_path
