"""Forecast of an MLA conversion: its target class, KV bytes and engines.

The frequencies that keep RoPE may be unknown before calibration. Many engines load the grid of default RoPE only, which
small budgets often choose. Both outcomes are forecast, and an engine's verdict may depend on the frequencies.
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
    """Forecast of one split of the budget.

    ``kv_bytes_per_token``, of all layers without sliding windows, is an upper bound. The verdict of an engine is OPEN
    if it depends on frequencies that are not chosen yet.
    """

    carrier: Carrier
    kv_bytes_per_token: float
    frequencies_known: bool
    engines: dict[str, dict]


def forecast_split(opened: Source, split: mla.Split, settings: ConvertSettings) -> SplitForecast:
    """Forecast the conversion of an opened source with one split.

    Raises SurgeryError: the target class or the engine of the settings does not support the result.
    """
    config = opened.reader.config
    method, unchanged = mla.METHODS[settings.method], kept_layers(settings.keep_layers, opened.windows, opened.fixed)
    outcomes = [
        carrier_of(opened, MLAPlan(method, split, counts, kept=unchanged), settings)
        for counts in _possible_counts(opened, split, settings)
    ]
    # The last outcome has no grid: its class is the same, and it includes what the latent norm needs.
    carrier = outcomes[-1]
    result = carrier.writer.config(config)
    if settings.engine is not None:
        refuse_unless_loadable(settings.engine, whole_config(opened.reader, result))
    bytes_at = kv_bytes_of(result, carrier.writer.spec.dtype)
    return SplitForecast(
        carrier,
        bytes_at(1),  # the first token lies in every window
        len(outcomes) == 1,
        merged([engine_table(outcome.writer.config(config), folder=opened.reader.path) for outcome in outcomes]),
    )


def _possible_counts(
    opened: Source, split: mla.Split, settings: ConvertSettings
) -> list[tuple[torch.Tensor, ...] | None]:
    """Return the counts of rotated components by frequency for each outcome that engines distinguish: grid, no grid."""
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
