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

KEPT_EVERY = 10
"""Steps between saves to the journal."""

KEPT_BYTES = 2**30
"""Limit of the activation bytes of a sequence in all layers. Above it, activations are checkpointed per layer:
recomputation is a quarter of a step's work."""

REPORTS = 10
"""Progress lines with loss and mean gate per training."""


class GateObjective(Protocol):
    """Training objective of gates. Its tensors are float32 on one device, and are all that a step passes to the next.

    Attributes:
        name: for progress and errors.
    """

    name: str

    def groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for `torch.optim.AdamW` with their peak learning rates."""

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that change in training, parameters included, by name; the journal stores them."""

    def backward(self, step: int, sequence: int) -> Tensor:
        """Add one sequence's gradient to the parameters' and return its scalar loss."""

    def penalize(self, step: int) -> None:
        """Add gradients of terms that depend on no data, after the sequences' were averaged over all processes."""

    def finish(self, step: int) -> None:
        """Clamp parameters and update sums after an optimizer step."""

    def mean_gate(self) -> float:
        """Return the mean gate for progress lines: the share of full heads."""


def train_gates(session: ScoringSession, objective: GateObjective, batch: int | None = None) -> dict[str, Any]:
    """Train ``objective`` in place for the session's steps, resuming from its journal.

    Step s averages the gradients of sequences s·batch to (s + 1)·batch - 1, one per process by default. The processes
    share them, so that equal batches give equal results up to rounding. Returns steps, sequences per step, and mean
    loss over the first and the last tenth. Raises SurgeryError: loss or gradients are not finite, or the model does not
    support activation checkpointing.
    """
    steps, processes = session.settings.steps, session.processes
    batch = batch or processes.count
    optimizer = torch.optim.AdamW(objective.groups(), weight_decay=0.0)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = torch.zeros(steps)
    first = _restore(session.journal.get(), batch, objective, optimizer, losses)
    recomputation = recomputed_layers(session.model) if _activation_bytes(session) > KEPT_BYTES else nullcontext()
    with recomputation, session.progress.phase(objective.name, steps, "step") as advance:
        advance(first)
        for step in range(first, steps):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * schedule(step, steps)
            optimizer.zero_grad()
            sequences = range(step * batch + processes.rank, (step + 1) * batch, processes.count)
            local_losses = [objective.backward(step, sequence).detach().float().cpu() for sequence in sequences]
            losses[step] = _average(session, optimizer, local_losses, batch, f"{objective.name}, step {step + 1}")
            objective.penalize(step)
            optimizer.step()
            objective.finish(step)
            advance()
            steps_done = step + 1
            if steps_done % KEPT_EVERY == 0 or steps_done == steps:
                session.journal.put(_training_state(batch, objective, optimizer, losses, steps_done))
            if steps_done % -(-steps // REPORTS) == 0:
                line = f"{objective.name}: step {steps_done} of {steps}, loss {losses[step]:.4g}"
                session.progress.note(f"{line}, mean gate {objective.mean_gate():.3f}")
    tenth = -(-steps // 10)
    return {
        "steps": steps,
        "sequences_per_step": batch,
        "first_loss": losses[:tenth].mean().item(),
        "last_loss": losses[-tenth:].mean().item(),
    }


def schedule(step: int, steps: int) -> float:
    """Return the factor on learning rates: rises over the first fifth of the steps, falls over the last, else 1."""
    ramp = max(1, math.ceil(WARM_UP * steps))
    return min(1.0, (step + 1) / ramp, (steps - step) / ramp)


def _activation_bytes(session: ScoringSession) -> float:
    """Estimate the activation bytes of all layers for a sequence; infinite for experts and for offloaded layers."""
    config = session.model.config
    inner, experts = getattr(config, "intermediate_size", None), getattr(config, "num_experts_per_tok", None)
    if session.settings.offload or experts or not isinstance(inner, int):
        return math.inf
    heads, _, head_dim = head_shape(config)
    width = 16 * config.hidden_size + 16 * heads * head_dim + 6 * inner
    return session.layers * session.settings.length * width * torch.float32.itemsize


def _average(
    session: ScoringSession, optimizer: torch.optim.Optimizer, losses: list[Tensor], batch: int, where: str
) -> Tensor:
    """Average gradients, in place, over a step's sequences on all processes, and return the mean loss."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sums = [parameter.grad.flatten() for parameter in parameters]
    loss = torch.stack(losses).sum() if losses else torch.zeros(())
    flat = torch.cat([*sums, loss.to(sums[0]).flatten()])
    flat = session.processes.mean(flat * (session.processes.count / batch))
    if not flat.isfinite().all():
        raise SurgeryError(f"{where}: loss or gradients contain NaN or infinity; try --dtype float32")
    *means, loss = flat.split([*(part.numel() for part in sums), 1])
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad.copy_(mean.view_as(parameter))
    return loss[0].cpu()


def _training_state(
    batch: int, objective: GateObjective, optimizer: torch.optim.Optimizer, losses: Tensor, steps_done: int
) -> dict[str, Tensor]:
    moments = {
        f"adam.{index}.{name}": torch.as_tensor(value)
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }
    counts = {"batch": torch.tensor(batch), "done": torch.tensor(steps_done)}
    return {**objective.state(), **moments, "losses": losses, **counts}


def _restore(
    state: dict[str, Tensor] | None,
    batch: int,
    objective: GateObjective,
    optimizer: torch.optim.Optimizer,
    losses: Tensor,
) -> int:
    """Restore a state from the journal, if its steps were as large, and return the number of finished steps."""
    if state is None or state["batch"] != batch:
        return 0
    with torch.no_grad():
        for name, tensor in objective.state().items():
            tensor.copy_(state[name])
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if name.startswith("adam."):
            _, index, moment = name.split(".")
            moments.setdefault(int(index), {})[moment] = tensor.clone()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    losses.copy_(state["losses"])
    return int(state["done"])
