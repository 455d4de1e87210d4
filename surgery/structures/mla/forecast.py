"""Forecast of an MLA conversion: the class that will carry it, its KV bytes and its engines.

One thing is open then: which frequencies keep RoPE, where they are free to be chosen. Many engines load the grid of
default RoPE only. Small budgets often choose just that (the highest frequencies, once each), larger ones do not, so
both outcomes are forecast, and an engine's verdict is that of the list of frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surgery.architectures.choose import Carrier
from surgery.architectures.multimodal import whole_config
from surgery.engines.table import engine_table, refuse_unless_loadable
from surgery.engines.verdict import merged
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import Source
from surgery.structures.kept_layers import kept_layers
from surgery.structures.mla.output import carrier_of
from surgery.structures.mla.plans import MLAPlan
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms import mla


@dataclass(frozen=True)
class SplitForecast:
    """The outcome of one split of the budget, as far as it is known beforehand.

    Attributes:
        kv_bytes_per_token: of the result, all layers, at an infinite window; the most that it can be.
        frequencies_known: whether the rotary frequencies are settled already.
        engines: what each will say of the result, OPEN where that depends on frequencies yet to be chosen.
    """

    split: mla.Split
    carrier: Carrier
    kv_bytes_per_token: float
    frequencies_known: bool
    engines: dict[str, dict]


def forecast_split(opened: Source, split: mla.Split, settings: ConvertSettings) -> SplitForecast:
    """Forecasts the conversion of an opened source with one split.

    Raises:
        SurgeryError: the wanted carrier cannot hold it, or the engine asked for does not take it.
    """
    config = opened.reader.config
    method, unchanged = mla.METHODS[settings.method], kept_layers(settings.keep_layers, opened.windows, opened.fixed)
    outcomes = [
        carrier_of(opened, MLAPlan(method, split, counts, kept=unchanged), settings)
        for counts in _possible_counts(opened, split, settings)
    ]
    # The last is the one without a grid: the class is the same, and what a norm needs besides is in it.
    carrier = outcomes[-1]
    result = carrier.writer.config(config)
    if settings.engine is not None:
        refuse_unless_loadable(settings.engine, whole_config(opened.reader, result))
    bytes_at = kv_bytes_of(result, carrier.writer.spec.dtype)
    return SplitForecast(
        split,
        carrier,
        bytes_at(1),  # the first token lies in every window
        len(outcomes) == 1,
        merged([engine_table(outcome.writer.config(config)) for outcome in outcomes]),
    )


def _possible_counts(
    opened: Source, split: mla.Split, settings: ConvertSettings
) -> list[tuple[torch.Tensor, ...] | None]:
    """Components of each frequency that keep RoPE, in the outcomes that engines tell apart: a grid, and no grid."""
    if mla.METHODS[settings.method].folds:
        return [None]  # fixed by the method
    anatomy = opened.first
    pairs, rotary_pairs = anatomy.head_dim // 2, split.rope_dim // 2
    highest = (torch.arange(pairs) < rotary_pairs).long()
    if settings.rope_frequencies == "grid":
        return [(highest,) * opened.layers]
    full, rest = divmod(rotary_pairs, anatomy.kv_heads)
    lowest = torch.zeros(pairs, dtype=torch.long)
    lowest[pairs - full :] = anatomy.kv_heads
    if rest:
        lowest[pairs - full - 1] = rest
    outcomes = [highest, lowest] if 0 < rotary_pairs <= pairs else [lowest]
    return [(counts,) * opened.layers for counts in outcomes]
