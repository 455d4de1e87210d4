"""The training of gates: what DuoAttention's and PruLong's have in common."""

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
"""Share of the steps over which the learning rates rise, and over which they fall in the end: DuoAttention's."""

KEPT_EVERY = 10
"""Steps between two states in the journal."""

KEPT_BYTES = 2**30
"""That all layers may keep of a sequence for the backward pass. Past it each keeps its input alone and computes the
rest again, which is a quarter of a step's work."""

REPORTS = 10
"""Lines with loss and gates in a training."""


class GateObjective(Protocol):
    """Objective of the training of gates. All its tensors are float32 on one device; steps depend on each other only
    through them.

    Attributes:
        name: for progress and errors.
    """

    name: str

    def groups(self) -> list[dict[str, Any]]:
        """The parameters, as parameter groups of `torch.optim.AdamW` with their peak learning rates."""

    def state(self) -> dict[str, Tensor]:
        """Everything that changes in training, parameters included, by name: what a resumed training is given."""

    def backward(self, step: int, sequence: int) -> Tensor:
        """Adds one sequence's gradient to the parameters'; returns its loss, a scalar."""

    def penalize(self, step: int) -> None:
        """Adds the gradient of what depends on no data, after the sequences' were averaged over all processes."""

    def finish(self, step: int) -> None:
        """Called when parameters were changed: clamps and collects."""

    def mean_gate(self) -> float:
        """Return the mean gate, for people: how much of the model is full."""


def train_gates(session: ScoringSession, objective: GateObjective, batch: int | None = None) -> dict[str, Any]:
    """Trains for the session's steps, from where its journal left off; `objective` then holds the result.

    Step s takes sequences s·batch to (s + 1)·batch - 1 and averages their gradients. They are dealt to the processes,
    so that equal batches give equal results, but for rounding, on any number of them.

    Args:
        batch: sequences a step; None for one a process.

    Returns:
        Facts: steps, sequences a step, mean loss over the first and the last tenth of the steps.

    Raises:
        SurgeryError: the loss or the gates are not finite, or the model's layers cannot be computed again.
    """
    steps, processes = session.settings.steps, session.processes
    batch = batch or processes.count
    key = f"training {objective.name}, {batch} sequences a step"
    optimizer = torch.optim.AdamW(objective.groups(), weight_decay=0.0)
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses = torch.zeros(steps)
    first = _restore(session.journal.get(key), objective, optimizer, losses)
    again = recomputed_layers(session.model) if _kept_bytes(session) > KEPT_BYTES else nullcontext()
    with again, session.progress.phase(objective.name, steps, "step") as advance:
        advance(first)
        for step in range(first, steps):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * schedule(step, steps)
            optimizer.zero_grad()
            mine = range(step * batch + processes.rank, (step + 1) * batch, processes.count)
            share = [objective.backward(step, sequence).detach().float().cpu() for sequence in mine]
            losses[step] = _average(session, optimizer, share, batch, f"{objective.name}, step {step + 1}")
            objective.penalize(step)
            optimizer.step()
            objective.finish(step)
            advance()
            steps_done = step + 1
            if steps_done % KEPT_EVERY == 0 or steps_done == steps:
                session.journal.put(key, _everything(objective, optimizer, losses, steps_done))
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
    """Factor of the learning rates: up over the first fifth of the steps, down over the last, 1 between."""
    ramp = max(1, math.ceil(WARM_UP * steps))
    return min(1.0, (step + 1) / ramp, (steps - step) / ramp)


def _kept_bytes(session: ScoringSession) -> float:
    """Estimate the activation bytes of all layers for a sequence; no bound for experts, and for layers that come and
    go."""
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
    """Makes the parameters' gradients the mean over a step's sequences, of all processes; returns their mean loss."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sums = [parameter.grad.flatten() for parameter in parameters]
    loss = torch.stack(losses).sum() if losses else torch.zeros(())
    flat = torch.cat([*sums, loss.to(sums[0]).flatten()])
    flat = session.processes.mean(flat * (session.processes.count / batch))
    if not flat.isfinite().all():
        raise SurgeryError(f"{where}: the loss or its gradients are not finite; try dtype float32")
    *means, loss = flat.split([*(part.numel() for part in sums), 1])
    for parameter, mean in zip(parameters, means, strict=True):
        parameter.grad.copy_(mean.view_as(parameter))
    return loss[0].cpu()


def _everything(
    objective: GateObjective, optimizer: torch.optim.Optimizer, losses: Tensor, steps_done: int
) -> dict[str, Tensor]:
    moments = {
        f"adam.{index}.{name}": torch.as_tensor(value)
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }
    return {**objective.state(), **moments, "losses": losses, "done": torch.tensor(steps_done)}


def _restore(
    state: dict[str, Tensor] | None, objective: GateObjective, optimizer: torch.optim.Optimizer, losses: Tensor
) -> int:
    """Puts a state from the journal back; returns the steps that were done."""
    if state is None:
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
