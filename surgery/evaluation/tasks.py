"""Construction of an evaluation's tasks and their data from settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.session import ProgressLike, Task
from surgery.eval.tasks.kv_bytes import KVBytesTask
from surgery.eval.tasks.lm_harness import LmHarnessTask
from surgery.evaluation.kinds import builder, plugin_errors, plugin_of
from surgery.evaluation.settings import HARNESS, EvalSettings
from surgery.evaluation.task_data import TaskData


@dataclass(frozen=True)
class Tasks:
    """Tasks that run on every row.

    Attributes:
        all: tasks, KV bytes first.
        context: context length in tokens of the KV bytes.
        length: tokens per held-out window.
        settings: settings by task name; computed once, since they hash texts and folders.
        plugins: origins of the tasks that plug-ins add, by task name; see `plugin_of`.
    """

    all: tuple[Task, ...]
    context: int
    length: int
    settings: dict[str, dict[str, Any]]
    plugins: dict[str, str]


def build_tasks(
    settings: EvalSettings, tokenizer: PreTrainedTokenizerBase, config: dict[str, Any], progress: ProgressLike
) -> Tasks:
    """Build the tasks and their data, within the position limit of the first model's config.

    Raises SurgeryError: there is too little text, or a task cannot be built with this tokenizer or these lengths.
    """
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    if limit and settings.length > limit:
        progress.note(f"windows of {limit} tokens instead of {settings.length}: the model's limit")
        settings = replace(settings, length=limit, decoded=min(settings.decoded, limit // 2))
    data = TaskData(settings, tokenizer, limit)
    context = settings.kv_context or settings.length
    tasks: list[Task] = [KVBytesTask(context)]
    settings_of, plugins = {}, {}
    for name in settings.tasks:
        if name.startswith(HARNESS):
            include = Path(settings.lm_eval_include) if settings.lm_eval_include else None
            options = settings.num_fewshot, tokenizer.name_or_path, settings.needle_lengths
            tasks.append(LmHarnessTask(name.removeprefix(HARNESS), include, *options))
            continue
        try:
            with plugin_errors(name, plugin := plugin_of(name)):
                task = builder(name)(data)
                settings_of[task.name] = task.settings()
        except SurgeryError as error:
            # Default tasks that cannot be built are skipped.
            if settings.tasks != EvalSettings.tasks:
                raise
            progress.note(f"no {name}: {error}")
            continue
        tasks.append(task)
        if plugin is not None:
            plugins[task.name] = plugin
            # A plug-in's results depend on the text, whether its author thought of that or not.
            settings_of[task.name] |= {"text_sha256": data.sha256}
    # The settings of an unknown lm-eval task raise here, before any measurement.
    settings_of = {task.name: settings_of.get(task.name) or task.settings() for task in tasks}
    return Tasks(tuple(tasks), context, settings.length, settings_of, plugins)
