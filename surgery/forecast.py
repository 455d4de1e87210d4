"""What can be said of a conversion before it starts: the class that will carry it, and its KV bytes.

One thing is open then: which frequencies keep RoPE when they are free to be chosen. The choice of the class does not
depend on it. Which engines load a stock result does: they want the grid of default RoPE. A free list is assumed to be
no such grid, as it is in all but contrived models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surgery.architectures.choose import Carrier, engines
from surgery.convert import Source, _carrier, _planned_tensors
from surgery.mla_split import MLAPlan
from surgery.settings import ConvertSettings
from surgery.transforms import mla


@dataclass(frozen=True)
class Forecast:
    """The outcome of one split of the budget, as far as it is known beforehand.

    Attributes:
        kv_bytes_per_token: of the result, all layers, at an infinite window.
        frequencies_known: whether the rotary frequencies, and with them the engines, are settled already.
    """

    split: mla.Split
    carrier: Carrier
    kv_bytes_per_token: int
    frequencies_known: bool
    engines: dict[str, str]


def forecast(opened: Source, split: mla.Split, settings: ConvertSettings) -> Forecast:
    """Foresees the conversion of an opened source with one split.

    Raises:
        SurgeryError: the wanted carrier cannot hold it.
    """
    method = mla.METHODS[settings.method]
    known = method.folds or settings.rope_frequencies == "grid"
    counts = None if method.folds else _counts(opened, split, settings.rope_frequencies == "grid")
    carrier = _carrier(opened, MLAPlan(method, split, counts), settings)
    width = sum(carrier.writer.kv_width(layer) for layer in range(opened.layers))
    return Forecast(
        split,
        carrier,
        width * carrier.writer.spec.dtype.itemsize,
        known or not carrier.stock,
        engines(carrier, opened.reader.config),
    )


def weight_bytes(opened: Source, carrier: Carrier) -> int:
    """Bytes of all tensors that the conversion writes."""
    return sum(spec.nbytes for spec in _planned_tensors(opened, carrier).values())


def _counts(opened: Source, split: mla.Split, grid: bool) -> torch.Tensor:
    """Components of each frequency that keep RoPE: the highest once each, or lowest first for a list that is no grid."""
    anatomy = opened.anatomy(0)
    pairs, wanted = anatomy.head_dim // 2, split.rope_dim // 2
    if grid:
        return (torch.arange(pairs) < wanted).long()
    full, rest = divmod(wanted, anatomy.kv_heads)
    counts = torch.zeros(pairs, dtype=torch.long)
    counts[pairs - full :] = anatomy.kv_heads
    if rest:
        counts[pairs - full - 1] = rest
    return counts
