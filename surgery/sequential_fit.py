"""Fits converted layers to the source one after the other, each on what the converted layers before it hand on.

The target of a layer is what the source's attention put out plus what the residual stream has lost so far, so that
later layers make up for earlier ones. Memory: one layer, two residual streams over the calibration tokens, and the
linearised attention of the sampled queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.anatomy import AttentionAnatomy
from surgery.attention import CapturedAttention
from surgery.calibration.sweep import BoundaryStore
from surgery.layer_stream import LayerStream, StreamedLayer
from surgery.transforms.latent_layer import LatentLayer, SimulatedAttention
from surgery.transforms.least_squares import LatentFit


class SequentialFit:
    """Carries the calibration tokens through the converted layers and fits each before it is passed.

    Args:
        stream: the source model.
        store: what entered each of its layers in the forward sweep.
        tokens: the same calibration tokens [N, T].
        steps, iterations: Gauss-Newton steps a layer and conjugate-gradient iterations a step.
        queries: query positions sampled from each sequence in each step.
    """

    def __init__(
        self,
        stream: LayerStream,
        store: BoundaryStore,
        tokens: Tensor,
        *,
        steps: int,
        iterations: int,
        queries: int,
        batch_size: int,
        seed: int,
    ):
        self._stream, self._store, self._batch_size = stream, store, batch_size
        self._steps, self._iterations, self._queries, self._seed = steps, iterations, queries, seed
        self._hidden = stream.embed(tokens)

    def fit(
        self, index: int, layer: StreamedLayer, anatomy: AttentionAnatomy, start: LatentLayer, metric: Tensor
    ) -> tuple[LatentLayer, float]:
        """Fits one layer and passes it.

        Args:
            anatomy: the source's attention.
            start: the converted layer, any dtype.
            metric: second moment of the loss gradient at the attention's output, [D, D].

        Returns:
            The fitted layer (dtype and device of the stream) and the share of the error that is left.
        """
        device, dtype = self._stream.device, self._stream.dtype
        start = start.to(device, dtype)
        inputs, targets = self._problem(index, layer, anatomy.to(device, dtype))
        problem = LatentFit(start, inputs, targets, metric.to(device), queries=self._queries, seed=self._seed + index)
        fitted, _, after = problem.run(self._steps, self._iterations)
        self._stream.run_layer(layer, self._hidden, self._batch_size, SimulatedAttention(fitted))
        return fitted, after

    @torch.no_grad()
    def _problem(self, index: int, layer: StreamedLayer, anatomy: AttentionAnatomy) -> tuple[Tensor, Tensor]:
        """Inputs in the converted model and wanted outputs, [N, T, D] each, without the output bias."""
        source_hidden = self._store.load(index)
        inputs, targets = torch.empty_like(self._hidden), torch.empty_like(self._hidden)
        for start in range(0, len(source_hidden), self._batch_size):
            rows = slice(start, start + self._batch_size)
            hidden = source_hidden[rows].to(self._stream.device, self._stream.dtype)
            captured = CapturedAttention(anatomy)
            layer(hidden, captured)
            out = captured.outputs if anatomy.o_bias is None else captured.outputs - anatomy.o_bias
            converted_hidden = self._hidden[rows].to(hidden)
            inputs[rows] = layer.attention_inputs(converted_hidden).to(inputs)
            targets[rows] = (out + hidden - converted_hidden).to(targets)
        return inputs, targets
