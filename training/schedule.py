"""Progress of a run, and the learning rate that belongs to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Budget:
    """Budget of a run; None is no limit.

    Attributes:
        steps, tokens, seconds: the limits.
    """

    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def used(self, steps: float, tokens: float, seconds: float) -> float:
        """Share of the budget that is used up, by whichever limit is nearest; 1 and more ends the run."""
        limits = ((steps, self.steps), (tokens, self.tokens), (seconds, self.seconds))
        return max((used / limit for used, limit in limits if limit is not None), default=0.0)


def learning_rate(schedule: str, used: float, *, warmup: float = 0.0, final: float = 0.0) -> float:
    """Factor of the peak learning rate when a share `used` of the budget is used up.

    It rises in proportion over the first `warmup` of the budget. Then "constant" stays at 1, "linear" and "cosine" fall
    to `final` at the end.
    """
    if used < warmup:
        return used / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (used - warmup) / (1 - warmup)) if warmup < 1 else 1.0
    factor = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return final + (1 - final) * factor


@dataclass
class Position:
    """Position of a run: the part of a checkpoint next to weights, optimizer and random numbers.

    Attributes:
        step, tokens: done so far.
        seconds: of training, over all resumed runs; measuring does not count.
        step_seconds: of them, those inside of steps.
        measuring_seconds: of held-out losses and evaluations, next to those of training.
        recent: losses that a spike is measured against; `recent_nested`, by the share of latents that made them.
        spikes: steps in a row that were left out for theirs.
        first_loss, last_loss: of the first and the last step, the weighted sum.
        first_held_out, last_held_out: measurements, by name.
        best_held_out, best_step: the lowest cross-entropy on held-out rows, with nested ranks the mean of all shares',
            and when it was.
        waited: measurements since.
        measured_step: when the last one was.
        evaluations: results on the way, each with its step and tokens; see `evaluations.headline`.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    measuring_seconds: float = 0.0
    recent: list[float] = field(default_factory=list)
    recent_nested: dict[str, list[float]] = field(default_factory=dict)
    spikes: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    first_held_out: dict[str, float] = field(default_factory=dict)
    last_held_out: dict[str, float] = field(default_factory=dict)
    best_held_out: float | None = None
    best_step: int | None = None
    waited: int = 0
    measured_step: int | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)
