"""Guards that end a run early: loss spikes, signals, out-of-memory errors."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.eval.memory import is_out_of_memory
from surgery.training.settings import HealSettings

WINDOW = 50
"""Number of latest losses whose median a spike is compared with."""

FEWEST = 3
"""Losses needed before spikes are checked."""

FLOOR = 0.01
"""Lower bound of the median, in nats: the losses of a student that almost equals its teacher are noise."""

PATIENCE = 3
"""Consecutive spikes that end a run. With few rows per step, a single spike may just be a hard batch."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(SurgeryError):
    """Stop of a run by a signal, after its state was saved; `code` is the exit code, 128 plus the signal number."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class SpikeGuard:
    """Guard against losses that are not finite, and against consecutive loss spikes.

    `recent`, the last `WINDOW` losses without spikes, and `spikes`, the number of consecutive ones, are in checkpoints.
    """

    def __init__(self, factor: float | None, recent: list[float] | None = None, spikes: int = 0) -> None:
        """Take losses above `factor` times the last losses' median as spikes; None only checks for nan and infinity."""
        self._factor, self.recent, self.spikes = factor, list(recent or []), spikes

    def check(self, loss: float, gradient_norm: float, step: int, last_good: Path | None) -> str | None:
        """Check the loss of a step, counted from 1; return the message for a spike, whose update should be skipped.

        Raises SurgeryError: the loss or the gradient norm is not finite, or this is the spike number `PATIENCE` in a
        row.
        """
        where = f"step {step}: the loss is {loss:.4g}"
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            raise SurgeryError(f"{where} and the gradient norm {gradient_norm:.4g}; {_advice(last_good)}")
        if self._factor is not None and len(self.recent) >= FEWEST:
            usual = median(self.recent)
            if loss > self._factor * max(usual, FLOOR):
                self.spikes += 1
                spike = f"{where}, above {self._factor:g} times the recent median of {usual:.4g}"
                if self.spikes < PATIENCE:
                    return f"{spike}; its update is skipped"
                raise SurgeryError(f"{spike}, for {PATIENCE} steps in a row; {_advice(last_good)}")
        self.recent, self.spikes = [*self.recent, loss][-WINDOW:], 0
        return None


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
def memory_errors(settings: HealSettings, doing: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error into a message with the activity `doing()` and settings that need less memory.

    Raises SurgeryError: the block ran out of memory, on an accelerator or in the CPU's allocator.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise SurgeryError(f"out of memory at {doing()}; try {'; or '.join(knobs(settings))}") from error


def knobs(settings: HealSettings) -> list[str]:
    """Return settings that need less memory, the cheapest first."""
    advice = []
    if settings.batch_size > 1:
        batch, steps = settings.batch_size // 2, settings.gradient_accumulation * settings.batch_size
        advice.append(f"batch_size {batch} with gradient_accumulation {steps // batch}, for the same step")
    if not settings.gradient_checkpointing:
        advice.append("gradient_checkpointing true")
    if settings.dtype == "fp32":
        advice.append("dtype bf16")
    if settings.train in ("all", "attention"):
        advice.append('train "new" or "lora"' if settings.teacher else 'train "lora"')
    if settings.teacher is not None:
        advice.append("teacher_logits instead of a loaded teacher")
    advice.append(f"a length below {settings.length}")
    advice.append("more processes with configs/accelerate/fsdp2.yaml")
    return advice


def _advice(last_good: Path | None) -> str:
    if last_good is None:
        return "no checkpoint was saved yet; lower learning_rate or raise warmup"
    return f"the last good checkpoint is {last_good}; lower learning_rate, or raise warmup or spike, and restart"
