"""Stages of a conversion through layers that stay unchanged."""

from __future__ import annotations

import torch
from torch import nn

from surgery.families.anatomy import LayerAnatomy
from surgery.families.attention import CapturedAttention
from surgery.running.source import Source
from surgery.structures.converted_layers import ConvertedLayers
from surgery.structures.stages import StageTracker


def source_attention(opened: Source, layer: int) -> nn.Module | None:
    """Return a surrogate of the source's attention; None for a layer with a recurrent state, which runs unchanged."""
    if layer in opened.stateful:
        return None
    return CapturedAttention(source_anatomy(opened, layer))


def source_anatomy(opened: Source, layer: int) -> LayerAnatomy:
    """Return the anatomy of a layer with a KV cache, in the dtype and on the device of the stream."""
    return opened.anatomy(layer).to(torch.float64).to(opened.stream.device, opened.stream.dtype)


def pass_kept(opened: Source, index: int, runs: StageTracker, converted: ConvertedLayers) -> None:
    """Run all stages through an unchanged layer."""
    attention = source_attention(opened, index)
    with opened.stream.layer(index) as layer:
        runs.skip(layer, attention)
    converted.save(index, {})
