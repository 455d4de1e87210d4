"""Training of gates, shared by the DuoAttention and PruLong scorers."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError
from surgery.families.base import head_shape
from surgery.heads.gates import recomputed_layers
from surgery.heads.scorer import ScoringSession

WARM_UP = 0.2
"""Share of the steps for warm-up of the learning rates, and for their decay at the end, as in DuoAttention."""

KEPT_BYTES = 2**30
"""Limit of the activation bytes of a sequence in all layers. Above it, activations are checkpointed per layer:
recomputation is a quarter of a step's work."""

REPORTS = 10
"""Progress lines with loss and mean gate per training."""


class GateObjective(Protocol):
    """Training objective of gates. Its tensors are float32 on one device.

    Attributes:
        name: for progress and errors.
    """

    name: str

    def groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for `torch.optim.AdamW` with their peak learning rates."""

    def backward(self, step: int) -> Tensor:
        """Add the gradient of the step's sequence to the parameters' and return its scalar loss."""

    def penalize(self, step: int) -> None:
        """Add gradients of terms that depend on no data."""

    def finish(self, step: int) -> None:
        """Clamp parameters and update sums after an optimizer step."""

    def mean_gate(self) -> float:
        """Return the mean gate for progress lines: the share of full heads."""


def train_gates(session: ScoringSession, objective: GateObjective) -> dict[str, Any]:
    """Train ``objective`` in place for the session's steps, one sequence each.

    Returns the number of steps, and the mean loss over the first and the last tenth. Raises SurgeryError: loss or
    gradients are not finite, or the model does not support activation checkpointing.
    """
    steps = session.settings.steps
    optimizer = torch.optim.AdamW(objective.groups(), weight_decay=0.0)
    peaks = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses = torch.zeros(steps)
    recomputation = recomputed_layers(session.model) if _activation_bytes(session) > KEPT_BYTES else nullcontext()
    with recomputation, session.progress.phase(objective.name, steps, "step") as advance:
        for step in range(steps):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * schedule(step, steps)
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            losses[step] = objective.backward(step).detach()
            if not losses[step].isfinite() or not all(each.grad.isfinite().all() for each in parameters):
                raise SurgeryError(
                    f"{objective.name}, step {step + 1}: loss or gradients contain NaN or infinity; try --dtype float32"
                )
            objective.penalize(step)
            optimizer.step()
            objective.finish(step)
            advance()
            if (step + 1) % -(-steps // REPORTS) == 0:
                line = f"{objective.name}: step {step + 1} of {steps}, loss {losses[step]:.4g}"
                session.progress.note(f"{line}, mean gate {objective.mean_gate():.3f}")
    tenth = -(-steps // 10)
    return {"steps": steps, "first_loss": losses[:tenth].mean().item(), "last_loss": losses[-tenth:].mean().item()}


def schedule(step: int, steps: int) -> float:
    """Return the factor on learning rates: rises over the first fifth of the steps, falls over the last, else 1."""
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
