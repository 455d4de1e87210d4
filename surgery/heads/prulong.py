"""PruLong's gates (Bhaskar et al., "Cache Me If You Can", arXiv:2506.17121): which heads does prediction need?

Every KV head has a hard-concrete gate (Louizos et al., arXiv:1712.01312, §2.2): random, exactly 0 or 1 at times, and
differentiable in its log α. The loss is that of the next token on natural text, with one draw of all gates a sequence.
A Lagrangian λ1·(s - t) + λ2·(s - t)², descended in log α and ascended in λ1 and λ2, drives the expected share s of
streaming heads to t, which rises from 0 to the share asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from surgery.eval.logits import LogitReader
from surgery.heads.gate_training import train_gates
from surgery.heads.gates import gated_heads, input_device, mean_loss
from surgery.heads.scorer import HeadScores, ScoringSession

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1
"""β, γ and ζ of the hard-concrete distribution: those of Louizos et al."""

START = 2.0
"""log α at first: a gate is open in 97% of the draws."""

LEARNING_RATE, MULTIPLIER_RATE = 0.15, 0.1
"""Learning rates of log α, and of λ1 and λ2."""

DAMPING = 10.0
"""λ2 at first. The authors' code starts it at 0; in as few steps as here, s then swings about t."""

DESCENT = 0.8
"""Share of the steps over which t rises, as in the authors' code."""


def score(session: ScoringSession) -> HeadScores:
    """Scores a head by the chance of an open gate, averaged over the training: the sooner it can stream, the lower.

    At the end, gates are open or closed for good and log α drifts, so that its order among them says little.

    Parts: ``log_alpha`` [L, G] float32, of the end.

    Raises:
        SurgeryError: the loss is not finite, or the model's layers cannot be computed again.
    """
    objective = PruLongObjective(session)
    facts = train_gates(session, objective)
    facts = {**facts, "mean_gate": objective.mean_gate(), "multipliers": objective.multipliers.tolist()}
    parts = {"log_alpha": objective.log_alpha.detach().cpu()}
    return HeadScores((objective.chance_sum / session.settings.steps).cpu(), parts, facts)


def sampled_gates(log_alpha: Tensor, generator: torch.Generator) -> Tensor:
    """Hard-concrete gates in [0, 1], of the shape of ``log_alpha`` (Louizos et al., eq. 10 and 11).

    The noise is drawn on the CPU by ``generator``, so that all devices get the same.
    """
    uniform = torch.rand(log_alpha.shape, generator=generator).clamp(1e-6, 1 - 1e-6).to(log_alpha.device)
    concrete = torch.sigmoid((uniform.logit() + log_alpha) / TEMPERATURE)
    return (concrete * (HIGH - LOW) + LOW).clamp(0, 1)


def open_chance(log_alpha: Tensor) -> Tensor:
    """The chance that a gate is not 0 (Louizos et al., eq. 12)."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


class PruLongObjective:
    """Next-token loss under random gates, with a budget.

    Attributes:
        log_alpha: [L, G] float32.
        multipliers: [2] float32, λ1 and λ2.
        chance_sum: [L, G] float32, of the chance of an open gate over all steps.
    """

    name = "prulong"

    def __init__(self, session: ScoringSession, batch: int | None = None) -> None:
        """``batch`` sequences a step, as in `train_gates`; where there is less text, it comes again."""
        self._model, self._settings, self._seed = session.model, session.settings, session.seed
        self._text = session.text(session.settings.steps * (batch or session.processes.count))
        with torch.no_grad():
            self._reader = LogitReader(session.model, self._text)
        shape, device = (session.layers, session.kv_heads), input_device(session.model)
        self.log_alpha = torch.full(shape, START, dtype=torch.float32, device=device, requires_grad=True)
        self.multipliers = torch.tensor([0.0, DAMPING], dtype=torch.float32, device=device, requires_grad=True)
        self.chance_sum = torch.zeros(shape, dtype=torch.float32, device=device)

    def groups(self) -> list[dict[str, Any]]:
        """The gates, and the multipliers, which are ascended."""
        return [
            {"params": [self.log_alpha], "lr": self._settings.learning_rate or LEARNING_RATE},
            {"params": [self.multipliers], "lr": MULTIPLIER_RATE, "maximize": True},
        ]

    def state(self) -> dict[str, Tensor]:
        """The attributes."""
        return {"log_alpha": self.log_alpha, "multipliers": self.multipliers, "chance_sum": self.chance_sum}

    def backward(self, step: int, sequence: int) -> Tensor:
        """Backpropagate the mean loss of a sequence's tokens, under gates that are drawn for it."""
        # A generator on the CPU looks at the low 32 bits only.
        noise = torch.Generator().manual_seed((self._seed * 1_000_003 + sequence) % 2**32)
        gates = sampled_gates(self.log_alpha, noise)
        tokens = self._text[sequence % len(self._text)][None]
        with gated_heads(self._model, gates, self._settings.sinks, self._settings.recent):
            loss = mean_loss(self._reader, tokens)
            loss.backward()
        return loss

    def penalize(self, step: int) -> None:
        """Adds the gradient of the Lagrangian."""
        target = (1 - self._settings.target) * min(1.0, (step + 1) / (DESCENT * self._settings.steps))
        excess = 1 - open_chance(self.log_alpha).mean() - target
        (self.multipliers[0] * excess + self.multipliers[1] * excess.square()).backward()

    @torch.no_grad()
    def finish(self, step: int) -> None:
        """Adds up chances."""
        self.chance_sum += open_chance(self.log_alpha)

    def mean_gate(self) -> float:
        """The chance of an open gate, over all heads."""
        return open_chance(self.log_alpha.detach()).mean().item()
