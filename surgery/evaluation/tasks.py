"""Tasks with their data from settings, the same for every model of a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.session import ProgressLike, Task
from surgery.eval.tasks.kv_bytes import KVBytesTask
from surgery.eval.tasks.lm_harness import LmHarnessTask
from surgery.evaluation.kinds import builder
from surgery.evaluation.settings import HARNESS, EvalSettings
from surgery.evaluation.task_data import TaskData


@dataclass(frozen=True)
class Tasks:
    """Tasks that are measured on every row.

    Attributes:
        all: KV bytes first.
        context: tokens at which the KV bytes are stated.
        length: tokens of a held-out window.
        settings: of each by its name, asked for once: they hash texts and folders.
    """

    all: tuple[Task, ...]
    context: int
    length: int
    settings: dict[str, dict[str, Any]]


def build_tasks(
    settings: EvalSettings,
    tokenizer: PreTrainedTokenizerBase,
    config: dict[str, Any],
    progress: ProgressLike,
    conversations: Callable[[], list[str]] | None = None,
) -> Tasks:
    """Builds the tasks and their data.

    Args:
        config: of the baseline, or of the first checkpoint where there is none: its limit of positions shortens the
            windows, and is what default lengths and contexts are parts of.
        conversations: of the baseline, for `data` "chat".

    Raises:
        SurgeryError: there is too little text, or a task cannot be built with this tokenizer or these lengths.
    """
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    if limit and settings.length > limit:
        progress.note(f"windows of {limit} tokens instead of {settings.length}: the model's limit")
        settings = replace(settings, length=limit, decoded=min(settings.decoded, limit // 2))
    data = TaskData(settings, tokenizer, limit, conversations)
    context = settings.kv_context or settings.length
    tasks: list[Task] = [KVBytesTask(context)]
    for name in settings.tasks:
        if name.startswith(HARNESS):
            include = Path(settings.lm_eval_include) if settings.lm_eval_include else None
            tasks.append(LmHarnessTask(name.removeprefix(HARNESS), include, settings.num_fewshot))
            continue
        try:
            tasks.append(builder(name)(data))
        except SurgeryError as error:
            # What nobody asked for by name is left out where it cannot be done.
            if settings.tasks != EvalSettings.tasks:
                raise
            progress.note(f"no {name}: {error}")
    # What names a task that there is not says so here, before anything is measured.
    return Tasks(tuple(tasks), context, settings.length, {task.name: task.settings() for task in tasks})
