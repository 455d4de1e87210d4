"""Budget and position of a run, and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Budget:
    """Budget of a run: limits of steps, tokens and seconds; None for no limit."""

    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"max_{name} {limit}" for name, limit in asdict(self).items() if limit is not None)

    def used(self, steps: float, tokens: float, seconds: float) -> float:
        """Return the share of the budget that is used up, by the nearest limit; the run ends at 1."""
        limits = ((steps, self.steps), (tokens, self.tokens), (seconds, self.seconds))
        return max((used / limit for used, limit in limits if limit is not None), default=0.0)

    def reached(self, steps: int, tokens: int, seconds: float) -> str:
        """Return the first limit that is reached, "max_steps reached"; empty for none."""
        used = {"steps": steps, "tokens": tokens, "seconds": seconds}
        limits = asdict(self).items()
        return next((f"max_{name} reached" for name, limit in limits if limit is not None and used[name] >= limit), "")


def learning_rate(schedule: str, used: float, *, warmup: float = 0.0) -> float:
    """Return the learning rate, relative to its peak, after a share `used` of the budget.

    It rises linearly over `warmup`. Then "constant" stays at 1, while "linear" and "cosine" fall to 0 at the end.
    """
    if used < warmup:
        return used / warmup
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (used - warmup) / (1 - warmup)) if warmup < 1 else 1.0
    return 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2


@dataclass
class Position:
    """Position of a run: the state of the loop in a checkpoint, next to weights, optimizer and random state.

    Attributes:
        seconds: training time over all resumed runs, without measurements, which are in `measuring_seconds`.
        step_seconds: part of `seconds` inside steps.
        best_held_out, best_step: lowest loss by `Loop.judge`, the mean over all shares with nested ranks, and its step.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    measuring_seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    first_held_out: dict[str, float] = field(default_factory=dict)
    last_held_out: dict[str, float] = field(default_factory=dict)
    best_held_out: float | None = None
    best_step: int | None = None
    measured_step: int | None = None
