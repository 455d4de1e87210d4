"""Fits converted layers to the source one after the other, each on what the converted layers before it hand on.

The target of a layer is what the source's attention put out plus what the residual stream has lost so far, so that
later layers make up for earlier ones. Memory: one layer, two residual streams over the calibration tokens, and what the
solver of a layer takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.sweep import BoundaryStore
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import CapturedAttention
from surgery.running.activations import give_back
from surgery.running.layer_stream import LayerStream, StreamedLayer
from surgery.structures.fit_trial import FitTrial, TrialLosses
from surgery.structures.shared_fits import SharedFits

Solve = Callable[[Tensor, Tensor, SharedFits], nn.Module]
"""Fits a layer: from inputs in the converted model and wanted outputs, [N, T, D] each and without the output bias, to a
stand-in for its attention, on the stream's device and in its dtype. The last calls the fit itself, on all processes."""


class SequentialFit:
    """Carries the calibration tokens through the converted layers and has each fitted before it is passed.

    Args:
        stream: the source model.
        store: what entered each of its layers in the forward sweep.
        tokens: the same calibration tokens [N, T].
        trial: asks held-out text whether fits help; None where closed forms and fits are no two results.
        shared: calls fits on all processes.

    Attributes:
        hidden: of the converted model, what enters its next layer [N, T, D]; None once the fit was given up.
        tried: layers that were fitted so far.
        kept: those of them that are nearer to the source for it.
        given_up: the losses for which no more layers are fitted, and none keeps its fit.
    """

    def __init__(
        self,
        stream: LayerStream,
        store: BoundaryStore,
        tokens: Tensor,
        batch_size: int,
        trial: FitTrial | None,
        shared: SharedFits,
    ):
        self._stream, self._store, self._batch_size, self._trial = stream, store, batch_size, trial
        self._shared = shared
        self.hidden: Tensor | None = store.embed(stream, tokens, batch_size)
        self.tried: list[int] = []
        self.kept: list[int] = []
        self.given_up: TrialLosses | None = None

    def fit(
        self, index: int, layer: StreamedLayer, anatomy: AttentionAnatomy, closed: nn.Module, solve: Solve
    ) -> nn.Module:
        """Has one layer fitted and passes it.

        Args:
            anatomy: the source's attention.
            closed: a stand-in for its closed form.

        Returns:
            What ``solve`` gave, or ``closed`` where that is nearer to the source.
        """
        anatomy = anatomy.to(self._stream.device, self._stream.dtype)
        attention = solve(*self._problem(index, layer, anatomy), self._shared)
        self.tried.append(index)
        if self._trial is None or self._trial.is_nearer(layer, closed, attention):
            self.kept.append(index)
        else:
            attention = closed
        self.go_past(layer, attention)
        return attention

    def go_past(self, layer: StreamedLayer, attention: nn.Module | None) -> None:
        """Passes a layer that is not fitted, with ``attention`` in the place of its own if that is given."""
        self._stream.run_layer(layer, self.hidden, self._batch_size, attention)

    def settle(self, index: int) -> None:
        """To be called once a layer was passed: after some of them the model is asked whether it goes on."""
        due = self._trial and self.tried[-1:] == [index] and self._trial.is_asked(len(self.tried))
        if not due:
            return
        losses = self._trial.losses(index + 1)
        if not self._trial.is_worth_it(losses):
            self.given_up, self.kept, self.hidden = losses, [], None
            self._trial.drop()
            self._shared.end()

    def facts(self) -> dict[str, Any]:
        """For the report; see the attributes."""
        return {"tried": self.tried, "kept": self.kept, "given_up": self.given_up and asdict(self.given_up)}

    def state(self) -> dict[str, Any]:
        """Plain values and tensors, from which :meth:`restore` goes on."""
        return {"hidden": self.hidden, **self.facts()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state, whose tensors stay as they are."""
        self.tried, self.kept = state["tried"], state["kept"]
        self.given_up = TrialLosses(**state["given_up"]) if state["given_up"] else None
        self.hidden = None if state["hidden"] is None else self._store.memory.copy(state["hidden"])

    @torch.no_grad()
    def _problem(self, index: int, layer: StreamedLayer, anatomy: AttentionAnatomy) -> tuple[Tensor, Tensor]:
        """Inputs in the converted model and wanted outputs."""
        source_hidden = self._store.load(index)
        inputs, targets = (
            self._store.memory.empty(self.hidden.shape, self.hidden.dtype, self.hidden.device) for _ in range(2)
        )
        for start in range(0, len(source_hidden), self._batch_size):
            rows = slice(start, start + self._batch_size)
            hidden = source_hidden[rows].to(self._stream.device, self._stream.dtype)
            captured = CapturedAttention(anatomy)
            captured(layer.attention_inputs(hidden))
            out = captured.outputs if anatomy.o_bias is None else captured.outputs - anatomy.o_bias
            converted_hidden = self.hidden[rows].to(hidden)
            inputs[rows] = layer.attention_inputs(converted_hidden).to(inputs)
            targets[rows] = (out + hidden - converted_hidden).to(targets)
            give_back(source_hidden, self.hidden, inputs, targets)
        return inputs, targets


def solver_dtype(stream: LayerStream) -> torch.dtype:
    """What least squares on a stream's activations run in: float32 where the stream runs in fewer bits."""
    return torch.promote_types(stream.dtype, torch.float32)
