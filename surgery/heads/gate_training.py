"""Training of the gates of :mod:`surgery.heads.duo`."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from surgery.common.errors import SurgeryError
from surgery.families.base import head_shape
from surgery.heads.gates import recomputed_layers
from surgery.heads.scorer import ScoringSession

if TYPE_CHECKING:
    from surgery.heads.duo import DuoObjective

LEARNING_RATE = 0.04
"""Default learning rate: twice the paper's, which trains for 2,000 steps."""

WARM_UP = 0.2
"""Share of the steps for warm-up of the learning rate, and for their decay at the end, as in DuoAttention."""

KEPT_BYTES = 2**30
"""Limit of the activation bytes of a sequence in all layers. Above it, activations are checkpointed per layer:
recomputation is a quarter of a step's work."""

REPORTS = 10
"""Progress lines with loss and mean gate per training."""


def train_gates(session: ScoringSession, objective: DuoObjective) -> dict[str, Any]:
    """Train ``objective`` in place for the session's steps, one sequence each.

    Returns the number of steps, and the mean loss over the first and the last tenth. Raises SurgeryError: loss or
    gradients are not finite, or the model does not support activation checkpointing.
    """
    steps = session.settings.steps
    gates, peak = objective.gates, session.settings.learning_rate or LEARNING_RATE
    optimizer = torch.optim.AdamW([gates], weight_decay=0.0)
    losses = torch.zeros(steps)
    recomputation = recomputed_layers(session.model) if _activation_bytes(session) > KEPT_BYTES else nullcontext()
    with recomputation, session.progress.phase("duo", steps, "step") as advance:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, steps)
            gates.grad = torch.zeros_like(gates)
            losses[step] = objective.backward(step).detach()
            if not losses[step].isfinite() or not gates.grad.isfinite().all():
                raise SurgeryError(
                    f"duo, step {step + 1}: loss or gradients contain NaN or infinity; try --dtype float32"
                )
            objective.penalize(step)
            optimizer.step()
            objective.finish(step)
            advance()
            if (step + 1) % -(-steps // REPORTS) == 0:
                line = f"duo: step {step + 1} of {steps}, loss {losses[step]:.4g}"
                session.progress.note(f"{line}, mean gate {objective.mean_gate():.3f}")
    tenth = -(-steps // 10)
    return {"steps": steps, "first_loss": losses[:tenth].mean().item(), "last_loss": losses[-tenth:].mean().item()}


def schedule(step: int, steps: int) -> float:
    """Return the factor on the learning rate: rises over the first fifth of the steps, falls over the last, else 1."""
    ramp = max(1, math.ceil(WARM_UP * steps))
    return min(1.0, (step + 1) / ramp, (steps - step) / ramp)


def _activation_bytes(session: ScoringSession) -> float:
    """Estimate the activation bytes of all layers for a sequence; infinite for experts."""
    config = session.model.config
    inner, experts = getattr(config, "intermediate_size", None), getattr(config, "num_experts_per_tok", None)
    if experts or not isinstance(inner, int):
        return math.inf
    heads, _, head_dim = head_shape(config)
    width = 16 * config.hidden_size + 16 * heads * head_dim + 6 * inner
    return session.layers * session.settings.length * width * torch.float32.itemsize
