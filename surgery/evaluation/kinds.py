"""Registry of evaluation tasks by their names in ``--tasks``; imports torch only when a task is built."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from surgery.common.errors import SurgeryError
from surgery.common.machine_faults import fault_message
from surgery.common.plugins import Registry, load

if TYPE_CHECKING:
    from surgery.eval.session import Task
    from surgery.evaluation.task_data import TaskData

    Build = Callable[[TaskData], Task]

DEFAULT = ("loss", "recall", "needle", "generate", "speed")
TASKS: Registry[str | Build] = Registry("tasks", {name: f"surgery.eval.tasks.{name}:build" for name in DEFAULT})
"""Functions that build a task from `TaskData`, or their import paths (module:name).

"all" selects `DEFAULT`, without the tasks of installed packages.
"""


def builder(name: str) -> Build:
    """Return the builder of a task."""
    build_path = TASKS[name]
    return load(build_path) if isinstance(build_path, str) else build_path


def plugin_of(task: str) -> str | None:
    """Return the origin of a plug-in's task: name and version of its package, or a program; None for a built-in."""
    return None if task in DEFAULT else TASKS.distribution(task) or "a program"


@contextmanager
def plugin_errors(task: str, plugin: str | None) -> Iterator[None]:
    """Convert a crash of a task to one line if it is of a plug-in, as by `plugin_of`.

    Raises SurgeryError: the plug-in raised an exception, which is the cause, unless the machine is at fault.
    """
    try:
        yield
    except SurgeryError:
        raise
    except Exception as error:
        if plugin is None or fault_message(error) is not None:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
        raise SurgeryError(f"task {task} of {plugin} failed: {message}") from error
