"""DuoAttention's gates (Xiao et al., arXiv:2410.10819): without which heads do the model's answers come out otherwise?

The model is its own teacher: at the places that predict answers in sequences with needles, its last hidden states under
gates are held to those under full attention, and a penalty on the gates' mean pulls them to 0.

Three things differ from the authors'. Gates are float32 rather than of the model's dtype, in which they tie. The
squared error is relative to the teacher's mean square, so that no model's scale of hidden states sets the balance. And
the penalty's weight is no constant: it is a multiplier of the constraint that the mean gate is the share of full heads
that was asked for, raised while the mean lies above and lowered while it lies below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import LongTensor, Tensor

from surgery.heads.gate_training import train_gates
from surgery.heads.gates import gated_heads, input_device
from surgery.heads.scorer import HeadScores, ScoringSession
from surgery.running.attention_tap import AttentionCall, tapped

LEARNING_RATE = 0.04
"""Twice the paper's, whose trainings take 2,000 steps."""

DESCENT = 0.5
"""Share of the steps over which the mean gate that is asked for falls from 1 to the target."""


def score(session: ScoringSession) -> HeadScores:
    """Scores a head by its gate, averaged over the training: the sooner a head can stream, the lower.

    A gate of the end says only whether a head made it into the budget, and ties at 0 and 1. Averaged over a training in
    which the budget shrinks, gates rank the heads within the budget and outside of it.

    Parts: ``gates`` [L, G] float32, those of the end; ``slopes`` [L, G] float32, what the relative squared error fell
    by for a rise of the gate, averaged over the training.

    Raises:
        SurgeryError: the loss is not finite, or the model's layers cannot be computed again.
    """
    objective = DuoObjective(session)
    facts = train_gates(session, objective)
    steps = session.settings.steps
    parts = {"gates": objective.gates.detach().cpu(), "slopes": (objective.slope_sum / steps).cpu()}
    facts = {**facts, "mean_gate": objective.mean_gate(), "penalty": objective.penalty.item()}
    return HeadScores((objective.gate_sum / steps).cpu(), parts, facts)


class DuoObjective:
    """Distillation under gates, with a budget.

    Attributes:
        gates: [L, G] float32 in [0, 1], 1 at first.
        gate_sum, slope_sum: [L, G] float32, of the gates and of minus the distillation's gradient over all steps.
        penalty: weight of the mean gate.
    """

    name = "duo"

    def __init__(self, session: ScoringSession, batch: int | None = None) -> None:
        """``batch`` sequences a step, as in `train_gates`."""
        self._model, self._settings = session.model, session.settings
        self._device = input_device(session.model)
        self._needles = session.needles(session.settings.steps * (batch or session.processes.count))
        shape = session.layers, session.kv_heads
        self.gates = torch.ones(shape, dtype=torch.float32, device=self._device, requires_grad=True)
        self.gate_sum = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self.slope_sum = torch.zeros_like(self.gate_sum)
        self.penalty = torch.tensor(session.settings.penalty, dtype=torch.float32, device=self._device)

    def groups(self) -> list[dict[str, Any]]:
        """The gates."""
        return [{"params": [self.gates], "lr": self._settings.learning_rate or LEARNING_RATE}]

    def state(self) -> dict[str, Tensor]:
        """The attributes."""
        return {
            "gates": self.gates,
            "gate_sum": self.gate_sum,
            "slope_sum": self.slope_sum,
            "penalty": self.penalty,
        }

    def backward(self, step: int, sequence: int) -> Tensor:
        """Backpropagate the mean squared difference of hidden states, relative to the teacher's mean square."""
        tokens = self._needles.tokens[sequence][None]
        places = self._needles.answers[sequence, 1:].nonzero()[:, 0]
        # The same attention kernel as under gates, so that gates of 1 lose nothing.
        with torch.no_grad(), tapped(self._model, AttentionCall.output, places):
            teacher_states = self._states(tokens, places)
        with gated_heads(self._model, self.gates, self._settings.sinks, self._settings.recent, places):
            states = self._states(tokens, places)
            loss = (states - teacher_states).square().mean() / teacher_states.square().mean()
            loss.backward()
        return loss

    @torch.no_grad()
    def penalize(self, step: int) -> None:
        """Moves the penalty's weight and adds its gradient."""
        self.slope_sum -= self.gates.grad
        descent = min(1.0, (step + 1) / (DESCENT * self._settings.steps))
        excess = self.gates.mean() - (1 - (1 - self._settings.target) * descent)
        # By factors, because the loss of models lies orders of magnitude apart.
        self.penalty *= excess.exp()
        self.gates.grad += self.penalty / self.gates.numel()

    @torch.no_grad()
    def finish(self, step: int) -> None:
        """Keeps the gates between 0 and 1. A gradient still reaches them there."""
        self.gates.clamp_(0, 1)
        self.gate_sum += self.gates

    def mean_gate(self) -> float:
        """Return the mean gate of all heads."""
        return self.gates.detach().mean().item()

    def _states(self, tokens: LongTensor, places: LongTensor) -> Tensor:
        """Hidden states [n, hidden size] float32 after the last norm, at some places of one sequence."""
        output = self._model.base_model(input_ids=tokens.to(self._device), use_cache=False)
        return output.last_hidden_state[0, places.to(output.last_hidden_state.device)].float()
