"""DuoAttention scores of heads (Xiao et al., arXiv:2410.10819): gates trained to preserve the model's answers.

The model is its own teacher: at positions that predict answers in sequences with needles, last hidden states under
gates are trained towards those under full attention, and a penalty on the mean gate pulls gates to 0.

Three differences from the authors' method: gates are float32, since gates in the model's dtype tie; the squared error
is relative to the teacher's mean square, so that it does not depend on the scale of hidden states; the penalty's weight
is not constant but a multiplier of the constraint that the mean gate equals the target share of full heads, raised
while the mean is above and lowered while it is below.
"""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor

from surgery.eval.session import device_of
from surgery.heads.gate_training import train_gates
from surgery.heads.gates import gated_heads
from surgery.heads.scorer import HeadScores, ScoringSession
from surgery.running.attention_tap import AttentionCall, tap_attention

PENALTY = 0.05
"""Initial weight of the mean gate in the loss."""

DESCENT = 0.5
"""Share of the steps over which the constraint on the mean gate falls from 1 to the target."""


def score(session: ScoringSession) -> HeadScores:
    """Score each head by its gate, averaged over the training: the sooner a head can stream, the lower.

    Final gates only tell which heads fit the budget, with ties at 0 and 1. Parts: ``gates`` [L, G] float32, the final
    gates. Raises SurgeryError: the loss is not finite, or the model does not support activation checkpointing.
    """
    objective = DuoObjective(session)
    facts = train_gates(session, objective)
    parts = {"gates": objective.gates.detach().cpu()}
    facts = {**facts, "mean_gate": objective.mean_gate(), "penalty": objective.penalty.item()}
    return HeadScores((objective.gate_sum / session.settings.steps).cpu(), parts, facts)


class DuoObjective:
    """Distillation loss under gates [L, G] float32 in [0, 1], initially 1, with a penalty on their mean.

    ``gate_sum`` [L, G] is their sum over all steps.
    """

    def __init__(self, session: ScoringSession) -> None:
        """Draw a sequence per step."""
        self._model, self._settings = session.model, session.settings
        self._device = device_of(session.model)
        self._needles = session.needles(session.settings.steps)
        shape = session.layers, session.kv_heads
        self.gates = torch.ones(shape, dtype=torch.float32, device=self._device, requires_grad=True)
        self.gate_sum = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self.penalty = torch.tensor(PENALTY, dtype=torch.float32, device=self._device)

    def backward(self, step: int) -> Tensor:
        """Backpropagate the mean squared error of hidden states, relative to the teacher's mean square."""
        tokens = self._needles.tokens[step][None]
        positions = self._needles.answers[step, 1:].nonzero()[:, 0]
        # The same attention kernel as under gates, so that gates of 1 give a loss of 0.
        with torch.no_grad(), tap_attention(self._model, AttentionCall.output, positions):
            teacher_states = self._states(tokens, positions)
        with gated_heads(self._model, self.gates, self._settings.sinks, self._settings.recent, positions):
            states = self._states(tokens, positions)
            loss = (states - teacher_states).square().mean() / teacher_states.square().mean()
            loss.backward()
        return loss

    @torch.no_grad()
    def penalize(self, step: int) -> None:
        """Update the penalty's weight and add its gradient."""
        descent = min(1.0, (step + 1) / (DESCENT * self._settings.steps))
        excess = self.gates.mean() - (1 - (1 - self._settings.target) * descent)
        # Multiplicative, because losses of models differ by orders of magnitude.
        self.penalty *= excess.exp()
        self.gates.grad += self.penalty / self.gates.numel()

    @torch.no_grad()
    def finish(self, step: int) -> None:
        """Clamp the gates to [0, 1], outside autograd so that gradients still reach them, and add them to their sum."""
        self.gates.clamp_(0, 1)
        self.gate_sum += self.gates

    def mean_gate(self) -> float:
        """Return the mean gate over all heads."""
        return self.gates.detach().mean().item()

    def _states(self, tokens: LongTensor, positions: LongTensor) -> Tensor:
        """Compute hidden states [n, hidden size] float32 after the last norm, at positions of one sequence."""
        output = self._model.base_model(input_ids=tokens.to(self._device), use_cache=False)
        return output.last_hidden_state[0, positions.to(output.last_hidden_state.device)].float()
