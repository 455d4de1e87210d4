"""Guards that end a run early: losses that explode, signals, memory that runs out."""

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
"""Losses whose median a spike is measured against."""

FEWEST = 3
"""Losses before there is a median to speak of."""

FLOOR = 0.01
"""Nats below which a median counts as this: what a student that is almost its teacher does is noise."""

PATIENCE = 3
"""Losses in a row that are spikes and end a run: of few rows a step, a single one may just have been hard."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(SurgeryError):
    """A run was asked to stop, and has saved what it had.

    Attributes:
        code: exit code, 128 and the signal's number as shells have it.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class SpikeGuard:
    """Refuses losses that are not finite, and several in a row that are far above the last ones.

    Attributes:
        recent: the last `WINDOW` losses that were no spikes; they belong in a checkpoint.
        spikes: how many have come in a row; they do, too.
    """

    def __init__(self, factor: float | None, recent: list[float] | None = None, spikes: int = 0) -> None:
        """`factor` times the median of the last losses is too much; None refuses only nan and infinity."""
        self._factor, self.recent, self.spikes = factor, list(recent or []), spikes

    def check(self, loss: float, gradient_norm: float, step: int, last_good: Path | None) -> str | None:
        """Looks at the loss of a step, counted from 1, before its update where that is possible.

        Returns:
            None, or of a spike what is to be said: its update should be left out.

        Raises:
            SurgeryError: the loss or the gradient's norm is not finite, or the loss is the last of `PATIENCE` spikes.
        """
        where = f"step {step}: the loss is {loss:.4g}"
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            raise SurgeryError(f"{where}, its gradient's norm {gradient_norm:.4g}; {_advice(last_good)}")
        if self._factor is not None and len(self.recent) >= FEWEST:
            usual = median(self.recent)
            if loss > self._factor * max(usual, FLOOR):
                self.spikes += 1
                spike = f"{where}, over {self._factor:g} times the last steps' median of {usual:.4g}"
                if self.spikes < PATIENCE:
                    return f"{spike}; its update is left out"
                raise SurgeryError(f"{spike}, as in the {PATIENCE - 1} steps before; {_advice(last_good)}")
        self.recent, self.spikes = [*self.recent, loss][-WINDOW:], 0
        return None


class StopRequest:
    """Remembers SIGTERM and SIGINT for the length of a `with` block.

    A second SIGINT acts as it would have without. A second SIGTERM does nothing: launchers pass on what schedulers and
    `surgery heal` have sent to all processes already, and the state is still to be saved.

    Attributes:
        signal: its number, 0 while there was none.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._take)
            except ValueError:  # not the main thread, which alone may: its owner has to stop the run
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _take(self, number: int, _frame: object) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def memory_errors(settings: HealSettings, doing: Callable[[], str]) -> Iterator[None]:
    """Turns running out of memory into a line that says which settings need less.

    Raises:
        SurgeryError: the block ran out of memory, on an accelerator or in the CPU's allocator.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise SurgeryError(f"out of memory at {doing()}: {'; or '.join(knobs(settings))}") from error


def knobs(settings: HealSettings) -> list[str]:
    """Return the settings that would take less memory, the cheapest first."""
    advice = []
    if settings.batch_size > 1:
        batch, steps = settings.batch_size // 2, settings.gradient_accumulation * settings.batch_size
        advice.append(f"batch_size {batch} with gradient_accumulation {steps // batch}, which is the same step")
    if not settings.gradient_checkpointing:
        advice.append("gradient_checkpointing true")
    if settings.dtype == "fp32":
        advice.append("dtype bf16")
    if settings.train in ("all", "attention"):
        advice.append('train "new" or "lora"' if settings.teacher else 'train "lora"')
    if settings.teacher is not None:
        advice.append("teacher_logits in place of the teacher")
    advice.append(f"a length below {settings.length}")
    advice.append("more processes with configs/accelerate/fsdp2.yaml")
    return advice


def _advice(last_good: Path | None) -> str:
    if last_good is None:
        return "no checkpoint was saved yet; lower learning_rate or raise warmup"
    return f"the last good checkpoint is {last_good}; lower learning_rate, or raise warmup or spike, and restart"
