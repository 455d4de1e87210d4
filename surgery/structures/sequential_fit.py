"""Fits converted layers to the source one after the other, each on what the converted layers before it hand on.

The target of a layer is what the source's attention put out plus what the residual stream has lost so far, so that
later layers make up for earlier ones. Memory: one layer, two residual streams over the calibration tokens, and what the
solver of a layer takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from surgery.calibration.sweep import BoundaryStore
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import CapturedAttention
from surgery.running.activations import give_back
from surgery.running.layer_stream import LayerStream, StreamedLayer

Solve = Callable[[Tensor, Tensor], nn.Module]
"""Fits a layer: from inputs in the converted model and wanted outputs, [N, T, D] each and without the output bias, to a
stand-in for its attention, on the stream's device and in its dtype."""


class SequentialFit:
    """Carries the calibration tokens through the converted layers and has each fitted before it is passed.

    Args:
        stream: the source model.
        store: what entered each of its layers in the forward sweep.
        tokens: the same calibration tokens [N, T].

    Attributes:
        hidden: of the converted model, what enters its next layer [N, T, D].
    """

    def __init__(self, stream: LayerStream, store: BoundaryStore, tokens: Tensor, batch_size: int):
        self._stream, self._store, self._batch_size = stream, store, batch_size
        self.hidden = store.embed(stream, tokens, batch_size)

    def fit(self, index: int, layer: StreamedLayer, anatomy: AttentionAnatomy, solve: Solve) -> nn.Module:
        """Has one layer fitted and passes it; ``anatomy`` is the source's attention. Gives what ``solve`` gave."""
        anatomy = anatomy.to(self._stream.device, self._stream.dtype)
        attention = solve(*self._problem(index, layer, anatomy))
        self._stream.run_layer(layer, self.hidden, self._batch_size, attention)
        return attention

    def go_past(self, layer: StreamedLayer, attention: nn.Module | None) -> None:
        """Passes a layer that is not fitted, with ``attention`` in the place of its own if that is given."""
        self._stream.run_layer(layer, self.hidden, self._batch_size, attention)

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
            layer(hidden, captured)
            out = captured.outputs if anatomy.o_bias is None else captured.outputs - anatomy.o_bias
            converted_hidden = self.hidden[rows].to(hidden)
            inputs[rows] = layer.attention_inputs(converted_hidden).to(inputs)
            targets[rows] = (out + hidden - converted_hidden).to(targets)
            give_back(source_hidden, self.hidden, inputs, targets)
        return inputs, targets
