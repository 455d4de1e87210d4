"""From settings to tasks with their data, the same for every model of a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.held_out_text import Document, HeldOutText, held_out_text
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
from surgery.evaluation.settings import BUILTIN, HARNESS, EvalSettings
from surgery.evaluation.texts import load_documents

RECALL_SEED = 1
"""Added to the seed for recall prompts, so that their filler is not that of the windows."""

OPENINGS, OPENING_CHARACTERS = 3, 160
"""Prompts of the generate task where none are given: openings of documents or sections."""

MOST_CONTEXTS = 4


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
    builder = _Builder(settings, tokenizer, limit, conversations)
    tasks: list[Task] = [KVBytesTask(settings.length)]
    for name in settings.tasks:
        if name.startswith(HARNESS):
            include = Path(settings.lm_eval_include) if settings.lm_eval_include else None
            tasks.append(LmHarnessTask(name.removeprefix(HARNESS), include, settings.num_fewshot))
            continue
        try:
            tasks.append(builder.build[name]())
        except SurgeryError as error:
            # What nobody asked for by name is left out where it cannot be done.
            if settings.tasks != EvalSettings.tasks:
                raise
            progress.note(f"no {name}: {error}")
    # What names a task that there is not says so here, before anything is measured.
    return Tasks(tuple(tasks), settings.length, {task.name: task.settings() for task in tasks})


class _Builder:
    """Makes tasks; the texts are read when the first of them needs them."""

    def __init__(
        self,
        settings: EvalSettings,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        conversations: Callable[[], list[str]] | None,
    ) -> None:
        self._settings, self._tokenizer, self._limit = settings, tokenizer, limit
        self._conversations = conversations
        self.build: dict[str, Callable[[], Task]] = {
            "loss": lambda: LossTask(self._text, settings.decoded),
            "recall": self._recall,
            "needle": self._needle,
            "ruler": self._ruler,
            "generate": lambda: GenerateTask(settings.prompts or self._openings(), settings.new_tokens),
            "memory": lambda: MemoryTask(self._contexts()),
            "speed": lambda: SpeedTask(self._contexts(), settings.batches),
            "repeat": self._repeat,
            "match": self._match,
            "kernels": lambda: KernelsTask(self._text, settings.decoded),
        }

    @cached_property
    def _documents(self) -> list[Document]:
        return load_documents(self._settings, self._conversations)

    @cached_property
    def _text(self) -> HeldOutText:
        settings = self._settings
        return held_out_text(self._tokenizer, self._documents, settings.windows, settings.length, settings.seed)

    @cached_property
    def _domain(self) -> str:
        if self._settings.domain != "auto":
            return self._settings.domain
        return "code" if set(self._settings.data) <= {BUILTIN, "code"} else "text"

    def _haystack(self) -> str | None:
        """Text for prompts: the held-out text, or for prose beside builtin code what the domain has by itself."""
        if self._domain == "text" and self._settings.data == (BUILTIN,):
            return None
        return "\n".join(document.text for document in self._documents)

    def _recall(self) -> Task:
        settings = self._settings
        prompts = recall_prompts(
            self._tokenizer,
            self._text.ids.numpy(),
            settings.recall_prompts,
            settings.length,
            settings.seed + RECALL_SEED,
        )
        return RecallTask(prompts)

    def _needle(self) -> Task:
        settings = self._settings
        return NeedleTask(
            lengths=settings.needle_lengths or default_lengths(self._limit),
            depths=settings.needle_depths,
            trials=settings.needle_trials,
            domain=self._domain,
            haystack=self._haystack(),
        )

    def _ruler(self) -> Task:
        settings = self._settings
        return RulerTask(
            lengths=settings.ruler_lengths or (settings.length,),
            samples=settings.ruler_samples,
            domain=self._domain,
            haystack=self._haystack(),
            tasks=settings.ruler_tasks or tuple(RULER_TASKS),
        )

    def _repeat(self) -> Task:
        settings, ids = self._settings, self._text.ids.numpy()
        most = min(self._limit or LAGS[-1] * 2, len(ids) - 1)
        lags = settings.repeat_lags or tuple(lag for lag in LAGS if row_length(lag) <= most)
        if not lags:
            raise SurgeryError(f"repeat: {most} tokens of text and context are too few for the shortest lag, {LAGS[0]}")
        bos = self._tokenizer.bos_token_id
        return RepeatTask({lag: repeat_rows(ids, lag, settings.repeat_rows, settings.seed, bos) for lag in lags})

    def _match(self) -> Task:
        settings = self._settings
        prompts = self._text.tokens[: settings.match_prompts, : settings.length // 2]
        return MatchTask(prompts, settings.match_tokens)

    def _contexts(self) -> tuple[int, ...]:
        """The model's limit and halves of it, none above 32k unless asked for."""
        if self._settings.contexts:
            return self._settings.contexts
        longest = min(self._limit or 4096, 32_768)
        return tuple(sorted(longest >> step for step in range(MOST_CONTEXTS)))

    def _openings(self) -> tuple[str, ...]:
        starts = [(document, first) for document in self._documents for first, _ in document.sections][:OPENINGS]
        return tuple(document.text[first : first + OPENING_CHARACTERS] for document, first in starts)
