"""Layers that a conversion leaves as they are, on their way through its stages."""

from __future__ import annotations

import torch
from torch import nn

from surgery.families.anatomy import LayerAnatomy
from surgery.families.attention import CapturedAttention
from surgery.model.quantized_cache import QuantizedKVLayer
from surgery.running.source import Source
from surgery.structures.converted_layers import ConvertedLayers
from surgery.structures.stages import StageRuns
from surgery.transforms.quantized_reading import QuantizedAttention


def source_attention(opened: Source, layer: int, cache: QuantizedKVLayer | None = None) -> nn.Module | None:
    """A stand-in for a layer's attention that computes what the source does; quantised with a ``cache``.

    None of a layer that keeps a state, which runs as it is.
    """
    if layer in opened.stateful:
        return None
    anatomy = source_anatomy(opened, layer)
    return CapturedAttention(anatomy) if cache is None else QuantizedAttention(anatomy, cache)


def source_anatomy(opened: Source, layer: int) -> LayerAnatomy:
    """Anatomy of a layer that keeps keys and values, in the dtype and on the device of the stream."""
    return opened.anatomy(layer).to(torch.float64).to(opened.stream.device, opened.stream.dtype)


def pass_kept(opened: Source, index: int, runs: StageRuns, converted: ConvertedLayers) -> None:
    """Carries all stages through a layer as it is, of which nothing is new."""
    attention = source_attention(opened, index)
    with opened.stream.layer(index) as layer:
        runs.go_past(layer, attention)
    converted.save(index, {})
