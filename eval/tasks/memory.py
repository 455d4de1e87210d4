"""The memory task: what the cache holds, and what prefill and decoding take, context by context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import GROWTH_STEPS, dtype_name, measure_kv
from surgery.eval.memory import OutOfMemory, measure_memory, unless_out_of_memory
from surgery.eval.peak_memory import PeakMemory
from surgery.eval.session import Session, device_of
from surgery.eval.tensor_bytes import weight_bytes

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData


@dataclass(frozen=True)
class MemoryTask:
    """Measures bytes in the checkpoint's own dtype; nothing is computed from a config.

    Attributes:
        contexts: tokens of a sequence, at least 2 each; they are measured from the smallest up.
        batch: sequences.
    """

    contexts: tuple[int, ...]
    batch: int = 1

    name: ClassVar[str] = "memory"
    native: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raises SurgeryError: there is no context, one is below 2, or the batch is below 1."""
        if not self.contexts or min(self.contexts) < 2 or self.batch < 1:
            raise SurgeryError(
                f"memory at contexts {list(self.contexts)} in batches of {self.batch}: "
                "give at least one context, of at least 2 tokens, and a batch of at least 1"
            )

    def settings(self) -> dict[str, Any]:
        """What decides the result besides the model."""
        return {"contexts": sorted(set(self.contexts)), "batch": self.batch}

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        """Measures on the main process, as the others have the same model.

        Returns:
            {"bytes_per_token", "growth_per_token" (of `KVUse`, at the largest context that fitted, None if none did),
            "weights_bytes", "dtype", "device", "batch", "contexts": [what `measure_memory` gives], "how"}.
        """
        return session.processes.from_main(lambda: self._measure(model, session))

    def _measure(self, model: PreTrainedModel, session: Session) -> dict[str, Any]:
        # The first pass ever loads libraries and makes buffers that stay: they are not the context's.
        unless_out_of_memory(lambda: measure_kv(model, 2))
        meter = PeakMemory(model)
        largest, rows = None, []
        contexts = self.settings()["contexts"]
        with session.progress.phase("memory", len(contexts), "context") as advance:
            for context in contexts:
                measured = unless_out_of_memory(lambda at=context: measure_memory(model, at, self.batch, meter))
                if isinstance(measured, OutOfMemory):
                    rows += _out_of_memory(contexts[len(rows) :])
                    break
                largest, row = measured
                rows.append(row)
                advance()
        return {
            "bytes_per_token": largest and largest.bytes_per_token,
            "growth_per_token": largest and largest.growth_per_token,
            "weights_bytes": weight_bytes(model),
            "dtype": dtype_name(model),
            "device": device_of(model).type,
            "batch": self.batch,
            "contexts": rows,
            "how": (
                f"cache: bytes of the tensors in the live cache; all but the last {GROWTH_STEPS} tokens are prefilled, "
                f"those are decoded one by one. Peaks: {meter.how}."
            ),
        }


def _out_of_memory(contexts: list[int]) -> list[dict[str, Any]]:
    """Rows of a context that did not fit and of the larger ones after it, which were not tried."""
    sizes = dict.fromkeys(("cache_bytes", "peak_prefill_bytes", "peak_decode_bytes"))
    notes = ["out of memory"] + [f"not tried: out of memory at {contexts[0]}"] * (len(contexts) - 1)
    return [{"context": context, **sizes, "note": note} for context, note in zip(contexts, notes, strict=True)]


def build(data: TaskData) -> MemoryTask:
    """From the settings and texts of an evaluation."""
    return MemoryTask(data.contexts())
