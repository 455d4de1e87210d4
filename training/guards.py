"""Guards that end a run early: losses that are not finite, signals, out-of-memory errors."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.eval.memory import is_out_of_memory

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(SurgeryError):
    """Stop of a run by a signal, after its state was saved; `code` is the exit code, 128 plus the signal number."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def check_finite(loss: float, gradient_norm: float, step: int, last_good: Path | None) -> None:
    """Raise SurgeryError if the loss of a step, counted from 1, or its gradient norm is not finite."""
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        saved = "no checkpoint was saved yet" if last_good is None else f"the last good checkpoint is {last_good}"
        raise SurgeryError(
            f"step {step}: the loss is {loss:.4g} and the gradient norm {gradient_norm:.4g}; {saved}; lower "
            "learning_rate or raise warmup, and restart"
        )


class StopRequest:
    """Context manager that records the number of the first SIGTERM or SIGINT instead of stopping.

    A second SIGINT reaches the previous handler. A second SIGTERM is ignored: launchers forward a signal that
    schedulers and `surgery heal` have sent to all processes already, while the state is being saved.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._handle)
            except ValueError:  # only the main thread may set handlers; elsewhere the caller has to stop the run
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, _frame: object) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def memory_errors(doing: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error into a message with the activity `doing()` and settings that need less memory.

    Raises SurgeryError: the block ran out of memory, on an accelerator or in the CPU's allocator.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise SurgeryError(
            f"out of memory at {doing()}; lower batch_size and raise gradient_accumulation as much, for the same step; "
            'or set gradient_checkpointing true, dtype bf16, train "lora", teacher_logits, a smaller length, or '
            "launcher fsdp2"
        ) from error
