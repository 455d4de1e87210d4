"""The speed task: prefill and decoding, context by context and batch by batch, beside the machine's roofline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import dtype_name
from surgery.eval.memory import OutOfMemory, beyond_trained_context, unless_out_of_memory
from surgery.eval.roofline import Ceilings, measure_ceilings
from surgery.eval.session import Session, device_of
from surgery.eval.speed import measure_speed
from surgery.eval.work import Work, reading

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData


@dataclass(frozen=True)
class SpeedTask:
    """Times the checkpoint in its own dtype, with the cache and the kernels that it uses by itself.

    Attributes:
        contexts: tokens of a prompt.
        batches: sequences at a time; every context is measured with every one.
        new_tokens: decoded after each prompt.
        repeats: timed runs of each point, after one that is not.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    new_tokens: int = 32
    repeats: int = 3

    name: ClassVar[str] = "speed"
    native: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raises SurgeryError: there is no context or no batch, or a number is below 1."""
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
        """What decides the result besides the model and the machine."""
        return {
            "contexts": sorted(set(self.contexts)),
            "batches": sorted(set(self.batches)),
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
        }

    def work(self, session: Session) -> Work:
        done = Work()
        for context in self.contexts:
            for batch in self.batches:
                done += reading((1 + self.repeats) * batch, context, batch, self.new_tokens)
        return done

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        """Measures on the main process while the others wait.

        Returns:
            {"dtype", "device", "threads", "repeats", "points": [what `measure_speed` gives, and a "note"], "ceilings":
            {"bytes_per_second", "flops_per_second"}}. A point that did not fit has None for its figures; ceilings and
            rooflines are None where there was no room to measure them.
        """
        return session.processes.from_main(lambda: self._measure(model, session))

    def _measure(self, model: PreTrainedModel, session: Session) -> dict[str, Any]:
        settings = self.settings()
        device, dtype = device_of(model), getattr(torch, dtype_name(model))
        ceilings = unless_out_of_memory(lambda: measure_ceilings(device, dtype))
        if isinstance(ceilings, OutOfMemory):
            ceilings = None
        sizes = [(context, batch) for context in settings["contexts"] for batch in settings["batches"]]
        points, refused = [], []
        with session.progress.phase("speed", len(sizes), "point") as advance:
            for size in sizes:
                points.append(self._point(model, size, refused, session.seed, ceilings))
                advance()
        return {
            "dtype": dtype_name(model),
            "device": device.type,
            "threads": torch.get_num_threads(),
            "repeats": self.repeats,
            "points": points,
            "ceilings": None if ceilings is None else asdict(ceilings),
        }

    def _point(
        self,
        model: PreTrainedModel,
        size: tuple[int, int],
        refused: list[tuple[int, int]],
        seed: int,
        ceilings: Ceilings | None,
    ) -> dict[str, Any]:
        """One point; adds its size to `refused` if it is out of memory, and does not try what is larger than those."""
        context, batch = size
        for smaller in refused:
            if smaller[0] <= context and smaller[1] <= batch:
                return _empty(size, f"not tried: out of memory at {smaller[1]} x {smaller[0]} tokens")
        point = unless_out_of_memory(
            lambda: measure_speed(model, context, batch, self.new_tokens, self.repeats, seed, ceilings)
        )
        if isinstance(point, OutOfMemory):
            refused.append(size)
            return _empty(size, "out of memory")
        return {**point, "note": beyond_trained_context(model, context + self.new_tokens)}


def _empty(size: tuple[int, int], note: str) -> dict[str, Any]:
    figures = ("prefill_tokens_per_second", "decode_tokens_per_second", "prefill_seconds", "decode_seconds", "roofline")
    return {"context": size[0], "batch": size[1], **dict.fromkeys(figures), "note": note}


def build(data: TaskData) -> SpeedTask:
    """From the settings and texts of an evaluation."""
    return SpeedTask(data.contexts(), data.settings.batches)
