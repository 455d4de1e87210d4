"""Refit of a converted layer's output projection on calibration text; see :mod:`surgery.transforms.output_refit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from surgery.families.attention import attend, output
from surgery.running.layer_stream import StreamedLayer
from surgery.structures.context import ConversionContext
from surgery.transforms.output_refit import refit_output

Attended = Callable[[Tensor, slice], Tensor]
"""Function from inputs [B, T, D], a batch of all inputs, and their slice to gated head outputs [B, T, H, e]."""


@torch.no_grad()
def refitted_output(
    work: ConversionContext, index: int, layer: StreamedLayer, o: Tensor, attended: Attended, first: int = 0
) -> Tensor:
    """Return the output projection ``o`` [D, H, e] of a converted layer, refitted; unchanged without text.

    Args:
        attended: computes the converted layer's head outputs on the source's inputs.
        first: number of first tokens to leave out.
    """
    if work.texts.calibration is None:
        return o
    stream, size = work.opened.stream, work.settings.batch_size
    source = replace(work.opened.anatomy(index), o_bias=None).to(stream.device, stream.dtype)
    inputs = work.attention_inputs(index, layer)[: work.refit_sequences]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(inputs), size):
            batch = slice(start, start + size)
            outputs = output(source, attend(source, source.project(inputs[batch])), inputs[batch])
            yield outputs[:, first:], attended(inputs[batch], batch)[:, first:]

    return refit_output(o, batches())
