"""Session that all tasks of one evaluation share, and the interface of a task."""

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
    """Bars on standard error: `surgery.common.progress.Progress`, or anything with these methods."""

    def phase(self, name: str, total: int, unit: str = ...) -> AbstractContextManager[Callable[..., None]]:
        """Gives a function that advances the bar by one, or by what it is given."""

    def note(self, text: str) -> None:
        """A line between bars."""


@dataclass(frozen=True)
class Session:
    """Context of every task besides the model.

    Attributes:
        tokenizer: one for all models of the report; losses over different tokens do not compare.
        processes: the processes that share the work.
        progress: bars.
        batch_size: sequences at a time. Part of a result's identity: rounding depends on it.
        seed: of every random choice.
        limit: at most this many samples a task, for a quick look; None for all.
    """

    tokenizer: PreTrainedTokenizerBase
    processes: Processes
    progress: ProgressLike
    batch_size: int = 8
    seed: int = 0
    limit: int | None = None


class Task(Protocol):
    """One thing to measure. A new task is a file in `eval/tasks/` and a line in `surgery/evaluation/kinds.py`.

    Attributes:
        name: what `--tasks` calls it, and the key of its result in the report.
        native: whether it is measured in the checkpoint's own dtype (bytes, speed) rather than in the one asked for.
    """

    name: str
    native: ClassVar[bool]

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result besides the model: sizes, seeds, hashes of the data. Plain values.

        Results compare only if these are equal.
        """

    def run(self, model: PreTrainedModel, session: Session, kept: Any) -> dict[str, Any]:
        """Measures `model`. Plain values for JSON; per-sample values where a paired comparison needs them.

        A result that has a `headline` gets a column of every report: its `value`, and if they are given `title`,
        `about` (the title in words, with the unit), `better` ("low" or "high") and `share` (true for a share of one).
        With `samples`, one number a sample, it is compared with the baseline's too.

        `kept` is what `keep` gave for the baseline, for tasks that have it; None otherwise, and where there is no
        baseline.
        """


@runtime_checkable
class ComparingTask(Protocol):
    """A task that compares with the baseline sample by sample while both are at hand."""

    def keep(self, model: PreTrainedModel, session: Session) -> Any:
        """Return the part of the baseline that is needed after it has gone."""


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's inputs."""
    return model.get_input_embeddings().weight.device


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
