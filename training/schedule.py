"""How far a run is, and the learning rate that belongs to it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """What a run may use; None is no limit.

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
    done = min(1.0, (used - warmup) / (1 - warmup)) if warmup < 1 else 1.0
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return final + (1 - final) * left
