"""Evaluations during training: tasks of `surgery eval` with its texts, prompts and seeds, run on the student."""

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
"""Seeds of `surgery eval`, not of the training: runs with other seeds are evaluated on the same data."""


class Evaluations:
    """Evaluation tasks of a run, with their data; `settings` by task name, as in a report of `surgery eval`."""

    def __init__(
        self,
        settings: HealSettings,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        processes: Processes,
        *,
        sharded: bool = False,
    ) -> None:
        """Build the tasks without running them.

        Args:
            limit: longest sequence that the student takes; None for no limit.
            processes: processes that share the batches.
            sharded: whether every process holds only a shard of the student. Every process then runs every batch, since
                a forward pass needs all of them.

        Raises:
            SurgeryError: a text cannot be read or is too short, or a task does not fit in the sequence length.
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
            _Lockstep() if sharded else processes,
            Progress(silent=True),
            batch_size=settings.batch_size,
            seed=SEED,
            limit=settings.evaluate_limit,
        )

    def measure(self, accelerator: Accelerator, module: nn.Module, student: PreTrainedModel) -> dict[str, Any]:
        """Evaluate the student within its possibly wrapped `module`; return the main metrics of each task (`headline`).

        Every process must call it. Random states, training mode and weights are unchanged afterwards. Raises
        SurgeryError: a task does not fit in the sequence length, or cannot run on the student.
        """

        def run() -> dict[str, Any]:
            return {task.name: headline(task.name, task.run(student, self._session, None)) for task in self._tasks}

        # Shapes other than a training step's would recompile the layers.
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
    """Return the main metrics of a task's result, for the run's log."""
    if task == "loss":
        losses = {"loss": result["loss"]}
        return losses | ({"cached_loss": result["cached"]["decoded_loss"]} if result["cached"] else {})
    return {"accuracy": result["accuracy"]}


def scalars(evaluation: dict[str, Any]) -> dict[str, float]:
    """Flatten the results of `Evaluations.measure` to `task/name`."""
    return {f"{task}/{name}": value for task, results in evaluation.items() for name, value in results.items()}


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch (CPU and device) after a ``with`` block."""
    python, others = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(others)


class _Lockstep(Processes):
    """Processes that each do all of the work, in lockstep."""

    def __init__(self) -> None:
        self.rank, self.count, self._state = 0, 1, None


def _within_forward(accelerator: Accelerator, module: nn.Module, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `run` in place of the trained module's forward pass, in which FSDP2 gathers embeddings and head."""
    inner = accelerator.unwrap_model(module)
    own = inner.__dict__.get("forward")  # accelerate's casting wrapper, an attribute of the instance
    inner.forward = lambda _: run()
    try:
        return module(torch.zeros((), device=accelerator.device))
    finally:
        del inner.forward
        if own is not None:
            inner.forward = own
