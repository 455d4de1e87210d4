"""Speed task: prefill and decode throughput by context length and batch size."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import LongTensor, nn
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import dtype_name, forward_with_cache, random_tokens
from surgery.eval.logits import evaluation_mode
from surgery.eval.memory import OutOfMemory, beyond_trained_context, unless_out_of_memory
from surgery.eval.session import Session, device_of, synchronize

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData


@dataclass(frozen=True)
class SpeedTask:
    """Throughput of the checkpoint in its own dtype, with its default cache and kernels, at contexts times batches.

    After each prompt ``new_tokens`` are decoded; a point has ``repeats`` timed runs after one warmup run.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    new_tokens: int = 32
    repeats: int = 3

    name: ClassVar[str] = "speed"
    native: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise SurgeryError if contexts or batches are empty, or a value is below 1."""
        if (
            not self.contexts
            or not self.batches
            or min(*self.contexts, *self.batches, self.new_tokens, self.repeats) < 1
        ):
            raise SurgeryError(
                f"speed at contexts {list(self.contexts)} and batches {list(self.batches)}, {self.new_tokens} new "
                f"tokens, {self.repeats} repeats: give at least one context and one batch, and no number below 1"
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the result in addition to the model and the machine."""
        return {
            "contexts": sorted(set(self.contexts)),
            "batches": sorted(set(self.batches)),
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
        }

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        """Measure on the main process while the other processes wait.

        Returns:
            {"dtype", "device", "threads", "repeats", "points": [result of `measure_speed` with a "note"]}. The figures
            of a point are None if it ran out of memory.
        """
        return session.processes.from_main(lambda: self._measure(model, session))

    def _measure(self, model: PreTrainedModel, session: Session) -> dict[str, Any]:
        settings = self.settings()
        sizes = [(context, batch) for context in settings["contexts"] for batch in settings["batches"]]
        points, refused = [], []
        with session.progress.phase("speed", len(sizes), "point") as advance:
            for size in sizes:
                points.append(self._point(model, size, refused, session.seed))
                advance()
        return {
            "dtype": dtype_name(model),
            "device": device_of(model).type,
            "threads": torch.get_num_threads(),
            "repeats": self.repeats,
            "points": points,
        }

    def _point(
        self, model: PreTrainedModel, size: tuple[int, int], refused: list[tuple[int, int]], seed: int
    ) -> dict[str, Any]:
        """Measure one point; out of memory, append its size to `refused`. Skip sizes larger than a refused one."""
        context, batch = size
        for smaller in refused:
            if smaller[0] <= context and smaller[1] <= batch:
                return _empty(size, f"not tried: out of memory at {smaller[1]} x {smaller[0]} tokens")
        point = unless_out_of_memory(lambda: measure_speed(model, context, batch, self.new_tokens, self.repeats, seed))
        if isinstance(point, OutOfMemory):
            refused.append(size)
            return _empty(size, "out of memory")
        return {**point, "note": beyond_trained_context(model, context + self.new_tokens)}


def _empty(size: tuple[int, int], note: str) -> dict[str, Any]:
    figures = ("prefill_tokens_per_second", "decode_tokens_per_second", "prefill_seconds", "decode_seconds")
    return {"context": size[0], "batch": size[1], **dict.fromkeys(figures), "note": note}


def build(data: TaskData) -> SpeedTask:
    """Build the task from the settings and texts of an evaluation."""
    return SpeedTask(data.contexts(), data.settings.batches)


@torch.no_grad()
def measure_speed(
    model: nn.Module, context: int, batch: int, new_tokens: int = 32, repeats: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Time the prefill of random prompts [batch, context] in one pass and the greedy decoding of `new_tokens`.

    The first run is a warmup. Each decode step feeds the most likely token of the previous step. Returns "context",
    "batch", "prefill_tokens_per_second" and "decode_tokens_per_second" (summed over sequences, at the median time),
    "prefill_seconds" and "decode_seconds" (one value per repeat). Raises SurgeryError: the model returns no cache.
    """
    prompts = random_tokens(model, batch, context, seed)
    with evaluation_mode(model):
        _timed_run(model, prompts, new_tokens)
        prefill, decode = zip(*(_timed_run(model, prompts, new_tokens) for _ in range(repeats)), strict=True)
    return {
        "context": context,
        "batch": batch,
        "prefill_tokens_per_second": batch * context / statistics.median(prefill),
        "decode_tokens_per_second": batch * new_tokens / statistics.median(decode),
        "prefill_seconds": list(prefill),
        "decode_seconds": list(decode),
    }


def _timed_run(model: nn.Module, prompts: LongTensor, new_tokens: int) -> tuple[float, float]:
    """Return the seconds of the prefill and of decoding."""
    synchronize(prompts.device)
    start = time.perf_counter()
    output, cache = forward_with_cache(model, prompts, None)
    synchronize(prompts.device)
    prefilled = time.perf_counter()
    for _ in range(new_tokens):
        output, cache = forward_with_cache(model, output.logits[:, -1:].argmax(-1), cache)
    synchronize(prompts.device)
    return prefilled - start, time.perf_counter() - prefilled
