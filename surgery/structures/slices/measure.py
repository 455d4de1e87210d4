"""Simulation of slices: the whole model with the dropped latents set to zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.architectures.sliced import LatentModel, Ranks
from surgery.calibration.held_out import HeldOut, Score
from surgery.common.progress import Progress
from surgery.running.layer_stream import LayerStream, StreamedLayer, blocks_of
from surgery.structures.stages import ERROR_SEQUENCES

BEFORE, SLICED = "before slicing", "sliced"
"""Stages in the report of a slice."""


@dataclass(frozen=True)
class MeasuredSlice:
    """Held-out measurement of the best candidate.

    Attributes:
        best: name of the best candidate.
        losses: held-out losses of all candidates; None without text.
        before: score of the whole checkpoint.
        score, hidden, errors: of the best candidate, its score, final hidden states [N, T, D] and errors by layer.
    """

    best: str
    losses: dict[str, float | None]
    before: Score
    score: Score
    hidden: Tensor
    errors: list[dict[str, float]]


def measure_slices(
    stream: LayerStream,
    whole: LatentModel,
    candidates: dict[str, Ranks],
    held_out: HeldOut,
    batch_size: int,
    progress: Progress,
) -> MeasuredSlice:
    """Run the whole model, with and without the latents that each candidate drops, over the text.

    The best candidate is that of the least loss, or the last one without text.
    """
    embedded = stream.embed(held_out.tokens)
    hidden = {name: embedded.clone() for name in candidates}
    errors: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
    with progress.phase("measure", whole.layers) as advance:
        for start, stop in blocks_of(stream.config):
            with stream.block(start, stop) as layer:
                inputs = embedded[:ERROR_SEQUENCES].clone().to(stream.device, stream.dtype)
                exact = _attention_outputs(layer, inputs)
                stream.run_layer(layer, embedded, batch_size)
                for name, ranks in candidates.items():
                    rows = [whole.kept_rows(index, ranks) for index in range(start, stop)]
                    with _zeroed_rows(layer, whole.down_name, rows):
                        cut = _attention_outputs(layer, inputs)
                        stream.run_layer(layer, hidden[name], batch_size)
                    pairs = zip(cut, exact, strict=True)
                    errors[name] += [{SLICED: float((a - b).norm() / b.norm())} for a, b in pairs]
            advance(stop - start)
    scores = {name: held_out.score(stream, states) for name, states in hidden.items()}
    losses = {name: score.loss for name, score in scores.items()}
    best = min(losses, key=losses.get) if held_out.texts else list(losses)[-1]
    return MeasuredSlice(best, losses, held_out.score(stream, embedded), scores[best], hidden[best], errors[best])


@torch.no_grad()
def _attention_outputs(layer: StreamedLayer, inputs: Tensor) -> list[Tensor]:
    """Return the attention outputs of each loaded layer, [B, T, D]."""
    outputs: list[Tensor] = []
    hooks = [
        block.self_attn.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
        for block in layer.model.layers
    ]
    layer(inputs)
    for hook in hooks:
        hook.remove()
    return outputs


@contextlib.contextmanager
def _zeroed_rows(layer: StreamedLayer, name: str, rows_of: list[tuple[int, ...]]) -> Iterator[None]:
    """Zero the output rows outside ``rows_of`` of a projection in each loaded layer, for a ``with`` block."""
    projections = [getattr(block.self_attn, name) for block in layer.model.layers]
    original = [[parameter.clone() for parameter in down.parameters()] for down in projections]
    with torch.no_grad():
        for down, rows in zip(projections, rows_of, strict=True):
            dropped = torch.ones(down.out_features, dtype=torch.bool, device=down.weight.device)
            dropped[list(rows)] = False
            for parameter in down.parameters():
                parameter[dropped] = 0
        yield
        for down, tensors in zip(projections, original, strict=True):
            for parameter, tensor in zip(down.parameters(), tensors, strict=True):
                parameter.copy_(tensor)
