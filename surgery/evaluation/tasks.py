"""From settings to tasks with their data, the same for every model of a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.needle import default_lengths
from surgery.eval.recall import recall_prompts
from surgery.eval.repeat import LAGS, repeat_rows, row_length
from surgery.eval.ruler.suite import TASKS as RULER_TASKS
from surgery.eval.session import ProgressLike, Task
from surgery.eval.tasks.generate import GenerateTask
from surgery.eval.tasks.kv_bytes import KVBytesTask
from surgery.eval.tasks.lm_harness import LmHarnessTask
from surgery.eval.tasks.loss import LossTask
from surgery.eval.tasks.match import MatchTask
from surgery.eval.tasks.memory import MemoryTask
from surgery.eval.tasks.needle import NeedleTask
from surgery.eval.tasks.recall import RecallTask
from surgery.eval.tasks.repeat import RepeatTask
from surgery.eval.tasks.ruler import RulerTask
from surgery.eval.tasks.speed import SpeedTask
from surgery.evaluation.kernels_task import KernelsTask
from surgery.evaluation.kinds import builder
from surgery.evaluation.settings import HARNESS, EvalSettings
from surgery.evaluation.task_data import TaskData

RECALL_SEED = 1
"""Added to the seed for recall prompts, so that their filler is not that of the windows."""


@dataclass(frozen=True)
class Tasks:
    """What is measured of every row.

    Attributes:
        all: KV bytes first.
        context: tokens at which the KV bytes are stated.
        settings: of each by its name, asked for once: they hash texts and folders.
    """

    all: tuple[Task, ...]
    context: int
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
    tasks: list[Task] = [KVBytesTask(settings.length)]
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
    return Tasks(tuple(tasks), settings.length, {task.name: task.settings() for task in tasks})


def loss(data: TaskData) -> Task:
    """Held-out loss, in forward passes and through the cache."""
    return LossTask(data.text, data.settings.decoded)


def recall(data: TaskData) -> Task:
    """Planted recalls in the held-out text."""
    asked = data.settings
    ids, seed = data.text.ids.numpy(), asked.seed + RECALL_SEED
    return RecallTask(recall_prompts(data.tokenizer, ids, asked.recall_prompts, asked.length, seed))


def needle(data: TaskData) -> Task:
    """Needles by length and depth."""
    asked = data.settings
    return NeedleTask(
        lengths=asked.needle_lengths or default_lengths(data.limit),
        depths=asked.needle_depths,
        trials=asked.needle_trials,
        domain=data.domain,
        haystack=data.haystack(),
    )


def ruler(data: TaskData) -> Task:
    """RULER-style tasks."""
    asked = data.settings
    return RulerTask(
        lengths=asked.ruler_lengths or (asked.length,),
        samples=asked.ruler_samples,
        domain=data.domain,
        haystack=data.haystack(),
        tasks=asked.ruler_tasks or tuple(RULER_TASKS),
    )


def generate(data: TaskData) -> Task:
    """Completions, to read."""
    return GenerateTask(data.settings.prompts or data.openings(), data.settings.new_tokens)


def memory(data: TaskData) -> Task:
    """Peak memory by context."""
    return MemoryTask(data.contexts())


def speed(data: TaskData) -> Task:
    """Decoding by context and batch."""
    return SpeedTask(data.contexts(), data.settings.batches)


def repeat(data: TaskData) -> Task:
    """Loss of a text's second occurrence, by lag."""
    asked, ids = data.settings, data.text.ids.numpy()
    most = min(data.limit or LAGS[-1] * 2, len(ids) - 1)
    lags = asked.repeat_lags or tuple(lag for lag in LAGS if row_length(lag) <= most)
    if not lags:
        raise SurgeryError(f"repeat: {most} tokens of text and context are too few for the shortest lag, {LAGS[0]}")
    bos = data.tokenizer.bos_token_id
    return RepeatTask({lag: repeat_rows(ids, lag, asked.repeat_rows, asked.seed, bos) for lag in lags})


def match(data: TaskData) -> Task:
    """How long greedy continuations are the baseline's."""
    asked = data.settings
    return MatchTask(data.text.tokens[: asked.match_prompts, : asked.length // 2], asked.match_tokens)


def kernels(data: TaskData) -> Task:
    """The loss once more, on the project's kernels."""
    return KernelsTask(data.text, data.settings.decoded)
