"""Shared session of the tasks of an evaluation, and the task interface."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch

from surgery.running.processes import Processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ProgressLike(Protocol):
    """Interface of progress bars; `surgery.common.progress.Progress` implements it."""

    def phase(self, name: str, total: int, unit: str = ...) -> AbstractContextManager[Callable[..., None]]:
        """Open a bar; the context gives a function that advances it by one, or by its argument."""

    def note(self, text: str) -> None:
        """Print a line between bars."""


@dataclass(frozen=True)
class Session:
    """Context that all tasks share, apart from the model.

    Attributes:
        tokenizer: shared by all models of a report, since losses over different tokens are not comparable.
        processes: processes that the work is distributed over.
        progress: progress bars.
        batch_size: sequences per batch. Part of a result's identity: rounding depends on it.
        seed: seed of all random choices.
        limit: maximum number of samples per task, for a quick run; None for all.
    """

    tokenizer: PreTrainedTokenizerBase
    processes: Processes
    progress: ProgressLike
    batch_size: int = 8
    seed: int = 0
    limit: int | None = None


class Task(Protocol):
    """Evaluation task. A new task is a file in `eval/tasks/` and a line in `surgery/evaluation/kinds.py`.

    Attributes:
        name: name in `--tasks`, and key of the result in the report.
        native: whether the task runs in the checkpoint's dtype (bytes, speed) instead of the evaluation's dtype.
    """

    name: str
    native: ClassVar[bool]

    def settings(self) -> dict[str, Any]:
        """Return everything but the model that determines the result: sizes, seeds, data hashes. Plain values.

        Results are comparable only if their settings are equal. For a plug-in's task the hash of the held-out text is
        added, and its package's version identifies stored results.
        """

    def run(self, model: PreTrainedModel, session: Session, kept: Any) -> dict[str, Any]:
        """Evaluate `model` and return JSON-serializable values, per sample if a paired comparison needs them.

        A `headline` in the result adds a column to every report: `value`, and optionally `title`, `about` (a longer
        title with the unit) and `share` (true for a value in [0, 1]). With `samples`, one value per sample, the column
        is also compared with the baseline.

        `kept` is the return value of `keep` for the baseline, or None if the task has no `keep` or there is no
        baseline.
        """


@runtime_checkable
class ComparingTask(Protocol):
    """Task that compares each model with stored outputs of the baseline."""

    def keep(self, model: PreTrainedModel, session: Session) -> Any:
        """Return the outputs of the baseline that are needed after the model is freed."""


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's inputs."""
    return model.get_input_embeddings().weight.device


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
