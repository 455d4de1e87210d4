"""Evaluations on the way: tasks of `surgery eval`, measured of the student as it is at a step.

They are the tasks, texts, prompts and seeds that `surgery eval` takes by default, so that a number of a run and one of
its checkpoint are of the same data. What computes them is the training's: its dtype, its batch size, its processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.calibration.held_out_documents import default_names, load_documents
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.held_out_text import HeldOutText, held_out_text
from surgery.eval.recall import recall_prompts
from surgery.eval.session import Session, Task
from surgery.eval.tasks.loss import LossTask
from surgery.eval.tasks.recall import RecallTask
from surgery.running.processes import Processes
from surgery.training.settings import HealSettings

WINDOWS, DECODED, PROMPTS = 24, 128, 48
SEED, RECALL_SEED = 0, 1
"""Seeds of `surgery eval`. Not the training's seed: runs with other seeds are measured on the same data."""


class Evaluations:
    """The tasks of a run, with their data.

    Attributes:
        settings: of each task by its name, as a report of `surgery eval` has them.
    """

    def __init__(
        self,
        settings: HealSettings,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        processes: Processes,
        *,
        sharded: bool = False,
    ) -> None:
        """Builds the tasks; nothing is measured yet.

        Args:
            limit: most tokens that the student takes; None for any number.
            processes: that share the batches among them.
            sharded: whether every process holds a part of the student only. Then each of them runs every batch, for
                all are needed in each pass.

        Raises:
            SurgeryError: a text cannot be read or is too short, or a task does not fit in a row's length.
        """
        self._length = min(settings.length, limit or settings.length)
        self._data, self._tokenizer = settings.evaluate_data or default_names(tokenizer), tokenizer
        self._compiled = settings.compile
        build: dict[str, Callable[[], Task]] = {
            "loss": lambda: LossTask(self._text, min(DECODED, self._length // 2)),
            "recall": self._recall,
        }
        try:
            self._tasks = [build[name]() for name in settings.evaluate_tasks]
        except SurgeryError as error:
            raise SurgeryError(f"evaluate_tasks: {error}", setting="evaluate_tasks") from None
        self.settings = {task.name: task.settings() for task in self._tasks}
        self._session = Session(
            tokenizer,
            _Alike() if sharded else processes,
            Progress(silent=True),
            batch_size=settings.batch_size,
            seed=SEED,
            limit=settings.evaluate_limit,
        )

    def measure(self, accelerator: Accelerator, module: nn.Module, student: PreTrainedModel) -> dict[str, Any]:
        """Measures the student; all processes call it, and get the same.

        The training does not notice: random numbers, modes and weights are what they were.

        Args:
            module: what is trained, maybe wrapped; the student is a part of it.

        Returns:
            By task, the numbers that tell most of its result; see `headline`.

        Raises:
            SurgeryError: a task does not fit in its length, or the student cannot be measured so.
        """

        def run() -> dict[str, Any]:
            return {task.name: headline(task.name, task.run(student, self._session, None)) for task in self._tasks}

        # Other shapes than those of a step would have the layers compiled again.
        eager = torch.compiler.set_stance("force_eager") if self._compiled else nullcontext()
        with torch.no_grad(), same_random_numbers(accelerator.device), accelerator.autocast(), eager:
            return _within_forward(accelerator, module, run)

    @cached_property
    def _text(self) -> HeldOutText:
        documents = load_documents(self._data, WINDOWS * self._length, seed=SEED)
        return held_out_text(self._tokenizer, documents, WINDOWS, self._length, SEED)

    def _recall(self) -> Task:
        ids = self._text.ids.numpy()
        return RecallTask(recall_prompts(self._tokenizer, ids, PROMPTS, self._length, SEED + RECALL_SEED))


def headline(task: str, result: dict[str, Any]) -> dict[str, Any]:
    """Return the plain numbers of a task's result for the run's log."""
    if task == "loss":
        losses = {"loss": result["loss"]}
        return losses | ({"cached_loss": result["cached"]["loss"]} if result["cached"] else {})
    return {"accuracy": result["accuracy"]}


def scalars(evaluation: dict[str, Any]) -> dict[str, float]:
    """The numbers of `Evaluations.measure`, by `task/name`."""
    return {f"{task}/{name}": value for task, results in evaluation.items() for name, value in results.items()}


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Leaves the random numbers of Python, NumPy and PyTorch, on the CPU and the device, as they were."""
    python, others = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(others)


class _Alike(Processes):
    """Every process does all of the work by itself, in step with the others."""

    def __init__(self) -> None:
        self.rank, self.count, self._state = 0, 1, None


def _within_forward(accelerator: Accelerator, module: nn.Module, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Calls `run` in place of the forward pass of what is trained, and gives what it gives.

    FSDP2 and ZeRO-3 have weights outside of the layers (embeddings, the head) whole only while a pass of the outermost
    module goes on.
    """
    inner = accelerator.unwrap_model(module)
    own = inner.__dict__.get("forward")  # accelerate's, which casts, stands on the module itself
    inner.forward = lambda _: run()
    try:
        return module(torch.zeros((), device=accelerator.device))
    finally:
        del inner.forward
        if own is not None:
            inner.forward = own
