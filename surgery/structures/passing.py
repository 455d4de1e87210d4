"""Layers that a conversion leaves as they are, on their way through its stages and its fit."""

from __future__ import annotations

import torch
from torch import nn

from surgery.families.attention import CapturedAttention
from surgery.model.quantized_cache import QuantizedKVLayer
from surgery.running.source import Source
from surgery.structures.alternatives import Alternatives
from surgery.structures.sequential_fit import SequentialFit
from surgery.structures.stages import StageRuns
from surgery.transforms.quantized_reading import QuantizedAttention


def source_attention(opened: Source, layer: int, cache: QuantizedKVLayer | None = None) -> nn.Module | None:
    """A stand-in for a layer's attention that computes what the source does; quantised with a ``cache``.

    None of a layer that keeps a state, which runs as it is.
    """
    if layer in opened.stateful:
        return None
    anatomy = opened.anatomy(layer).to(torch.float64).to(opened.stream.device, opened.stream.dtype)
    return CapturedAttention(anatomy) if cache is None else QuantizedAttention(anatomy, cache)


def pass_kept(
    opened: Source, index: int, fit: SequentialFit | None, runs: StageRuns, alternatives: Alternatives
) -> None:
    """Carries all stages and the fit through a layer as it is; nothing of it is new in any form."""
    attention = source_attention(opened, index)
    stages = [name for name in runs.hidden if name != "source"]
    with opened.stream.layer(index) as layer:
        if fit:
            fit.go_past(layer, attention)
        runs.go_past(layer, attention)
    for name in stages:
        alternatives.save(name, index, {})
