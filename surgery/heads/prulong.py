"""PruLong scores of heads (Bhaskar et al., "Cache Me If You Can", arXiv:2506.17121): gates under next-token loss.

Each KV head has a hard-concrete gate (Louizos et al., arXiv:1712.01312, §2.2): random, exactly 0 or 1 with some
probability, and differentiable in its log α. The loss is next-token loss on natural text, with one draw of all gates
per sequence. A Lagrangian λ1·(s - t) + λ2·(s - t)², minimized over log α and maximized over λ1 and λ2, drives the
expected share s of streaming heads to t, which rises from 0 to the target share.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from surgery.eval.logits import LogitReader
from surgery.eval.session import device_of
from surgery.heads.gate_training import train_gates
from surgery.heads.gates import gated_heads, mean_loss
from surgery.heads.scorer import HeadScores, ScoringSession

TEMPERATURE, LOW, HIGH = 2 / 3, -0.1, 1.1
"""β, γ and ζ of the hard-concrete distribution, with the values of Louizos et al."""

START = 2.0
"""Initial log α: a gate is open in 97% of the draws."""

LEARNING_RATE, MULTIPLIER_RATE = 0.15, 0.1
"""Learning rates of log α, and of λ1 and λ2."""

DAMPING = 10.0
"""Initial λ2. It is 0 in the authors' code; in as few steps as here, s then oscillates around t."""

DESCENT = 0.8
"""Share of the steps over which t rises, as in the authors' code."""


def score(session: ScoringSession) -> HeadScores:
    """Score heads by the probability of an open gate, averaged over the training: the sooner one can stream, the lower.

    Parts: ``log_alpha`` [L, G] float32, final values, which are saturated. Raises SurgeryError: the loss is not finite,
    or the model does not support activation checkpointing.
    """
    objective = PruLongObjective(session)
    facts = train_gates(session, objective)
    facts = {**facts, "mean_gate": objective.mean_gate(), "multipliers": objective.multipliers.tolist()}
    parts = {"log_alpha": objective.log_alpha.detach().cpu()}
    return HeadScores((objective.chance_sum / session.settings.steps).cpu(), parts, facts)


def sampled_gates(log_alpha: Tensor, generator: torch.Generator) -> Tensor:
    """Sample hard-concrete gates in [0, 1], in the shape of ``log_alpha`` (Louizos et al., eq. 10 and 11).

    ``generator`` draws the noise on the CPU, so that it is equal on all devices.
    """
    uniform = torch.rand(log_alpha.shape, generator=generator).clamp(1e-6, 1 - 1e-6).to(log_alpha.device)
    concrete = torch.sigmoid((uniform.logit() + log_alpha) / TEMPERATURE)
    return (concrete * (HIGH - LOW) + LOW).clamp(0, 1)


def open_probability(log_alpha: Tensor) -> Tensor:
    """Compute the probability that a gate is not 0 (Louizos et al., eq. 12)."""
    return torch.sigmoid(log_alpha - TEMPERATURE * math.log(-LOW / HIGH))


class PruLongObjective:
    """Next-token loss under random gates, with a Lagrangian on the share of streaming heads, λ1 and λ2.

    ``chance_sum`` [L, G] float32 is the probability of an open gate, summed over all steps.
    """

    name = "prulong"

    def __init__(self, session: ScoringSession) -> None:
        """Load text for a sequence per step; shorter text is repeated."""
        self._model, self._settings, self._seed = session.model, session.settings, session.seed
        self._text = session.text(session.settings.steps)
        with torch.no_grad():
            self._reader = LogitReader(session.model, self._text)
        shape, device = (session.layers, session.kv_heads), device_of(session.model)
        self.log_alpha = torch.full(shape, START, dtype=torch.float32, device=device, requires_grad=True)
        self.multipliers = torch.tensor([0.0, DAMPING], dtype=torch.float32, device=device, requires_grad=True)
        self.chance_sum = torch.zeros(shape, dtype=torch.float32, device=device)

    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the gates and of the multipliers, which are maximized."""
        return [
            {"params": [self.log_alpha], "lr": self._settings.learning_rate or LEARNING_RATE},
            {"params": [self.multipliers], "lr": MULTIPLIER_RATE, "maximize": True},
        ]

    def backward(self, step: int) -> Tensor:
        """Backpropagate the mean loss of the step's sequence under gates sampled for it."""
        # CPU generators use the low 32 bits of a seed only.
        noise = torch.Generator().manual_seed((self._seed * 1_000_003 + step) % 2**32)
        gates = sampled_gates(self.log_alpha, noise)
        tokens = self._text[step % len(self._text)][None]
        with gated_heads(self._model, gates, self._settings.sinks, self._settings.recent):
            loss = mean_loss(self._reader, tokens)
            loss.backward()
        return loss

    def penalize(self, step: int) -> None:
        """Add the gradient of the Lagrangian."""
        target = (1 - self._settings.target) * min(1.0, (step + 1) / (DESCENT * self._settings.steps))
        excess = 1 - open_probability(self.log_alpha).mean() - target
        (self.multipliers[0] * excess + self.multipliers[1] * excess.square()).backward()

    @torch.no_grad()
    def finish(self, step: int) -> None:
        """Add the probabilities of open gates to their sum."""
        self.chance_sum += open_probability(self.log_alpha)

    def mean_gate(self) -> float:
        """Return the mean probability of an open gate over all heads."""
        return open_probability(self.log_alpha.detach()).mean().item()
