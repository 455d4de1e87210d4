"""``surgery convert --to gqa`` and ``--to mqa``: fewer KV heads, in a plain checkpoint of the source's family.

Two sweeps over calibration text gather statistics; then one pass merges the heads of every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from surgery.architectures.own_family import (
    attention_tensors,
    choose_carrier,
    planned_attention,
)
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.human import short
from surgery.common.progress import Progress
from surgery.engines.table import refuse_unless_loadable
from surgery.families import head_shape
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import CapturedAttention
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import Source
from surgery.structures.base import Candidate, ConfigOf, Forecast, Outcome, Structure, unchanged_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.stages import StageTracker
from surgery.transforms.kv_heads import merge_kv_heads

MERGED = "merged"

DEFAULT_RATIO = 0.5
RATIO_TOLERANCE = 0.02
"""Relative tolerance when a ratio is matched to a number of heads, so that 0.33 selects two of six."""


@dataclass(frozen=True)
class HeadsLayerReport:
    """Report of one layer.

    Attributes:
        groups: the source's KV heads that each KV head replaces.
        key_error, value_error: predicted errors.
        measured: relative output error of the layer's attention on the source's inputs, at the merged stage.
    """

    layer: int
    groups: tuple[tuple[int, ...], ...]
    key_error: float
    value_error: float
    measured: dict[str, float]

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "merged KV heads", "keys, predicted", "values, predicted"

    def cells(self) -> tuple:
        groups = "  ".join("+".join(map(str, group)) for group in self.groups)
        return groups, short(self.key_error), short(self.value_error)


class KVHeads(Structure[Source, KVHeadsSettings]):
    """Conversion to fewer KV heads; the result stays in the source's family."""

    keeps_class = True

    def __init__(self, opened: Source, settings: KVHeadsSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        if opened.reader.stored_names and settings.engine is not None:
            raise SurgeryError(
                f"--engine: not supported for a vision-language model ({opened.reader.stored_as}), which runs in "
                "transformers only. Drop the option",
                setting="engine",
            )
        if opened.qk_norm:
            raise SurgeryError(
                "KV heads with a q/k-norm cannot be merged, as factors do not pass the norm: convert --to mla instead"
            )
        self._kv_heads = requested_heads(settings, opened.first)
        if opened.stateful:
            raise SurgeryError(
                "some layers have a recurrent state and no KV heads, which merging does not support: convert --to "
                "lowrank or --to mla"
            )
        self._carrier = choose_carrier(opened.reader.config, self._kv_heads)
        if settings.engine is not None:
            refuse_unless_loadable(settings.engine, self._carrier.config)

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return one candidate for every smaller number of heads that divides the source's."""
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        return [Candidate({"kv_heads": count}, scales=False) for count in _choices(heads)[:-1]]

    @classmethod
    def bench_configs(cls) -> dict[str, ConfigOf]:
        return {"": half_the_heads}

    def forecast(self) -> Forecast:
        opened, first, carrier = self.opened, self.opened.first, self._carrier
        source = kv_bytes_of(opened.reader.config, first.q.dtype)(1)
        return Forecast(
            config=carrier.config,
            tensors=self._planned_tensors(),
            kv_bytes_per_token=source // first.kv_heads * self._kv_heads,
            model_type=carrier.model_type,
            reasons=[carrier.reason],
            demand=Demand(),
        )

    def gather(self, work: ConversionContext) -> None:
        """Gather statistics with gradients: predicted errors use the metric of the loss for every method."""
        work.gather()

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        return self._planned_tensors()

    def closed_form(self, work: ConversionContext, layer: int) -> nn.Module:
        anatomy, stream = self.opened.anatomy(layer).to(torch.float64), self.opened.stream
        statistics = work.library.load(layer)[0]
        merged = merge_kv_heads(anatomy, statistics, self._kv_heads, self.settings.method).anatomy
        return CapturedAttention(merged.to(stream.device, stream.dtype))

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        carrier, kv_heads = self._carrier, self._kv_heads
        runs = work.stage_runs((MERGED,), steps=(MERGED,))
        reports = work.pass_layers(lambda index: self._merge(index, work, runs), runs, HeadsLayerReport)
        work.converted.write(self.opened.layers, writer)
        return Outcome(
            config=carrier.config,
            target={
                "to": "mqa" if kv_heads == 1 else "gqa",
                "method": self.settings.method,
                "model_type": carrier.model_type,
                "reasons": [carrier.reason],
                "kv_heads": kv_heads,
            },
            layers=reports,
            scores=runs.scores(),
            simulated=runs.hidden[MERGED],
            custom_class=carrier.custom_class,
        )

    def _merge(self, index: int, work: ConversionContext, runs: StageTracker) -> HeadsLayerReport:
        stream, source = self.opened.stream, self.opened.anatomy(index)
        anatomy, statistics = source.to(torch.float64), work.library.load(index)[0]
        merged = merge_kv_heads(anatomy, statistics, self._kv_heads, self.settings.method)
        attention = CapturedAttention(merged.anatomy.to(stream.device, stream.dtype))
        with stream.layer(index) as layer:
            errors = runs.advance(layer, anatomy, {MERGED: lambda: attention}, (MERGED,))
        work.converted.save(index, attention_tensors(merged.anatomy.to("cpu", source.q.dtype), index))
        return HeadsLayerReport(index, merged.groups, merged.key_error, merged.value_error, errors)

    def _planned_tensors(self) -> dict[str, TensorSpec]:
        opened, reader, first = self.opened, self.opened.reader, self.opened.first
        attention: dict[str, TensorSpec] = {}
        for layer in range(opened.layers):
            # Old checkpoints may store rotary frequencies, which follow from the config.
            names = [name for name in opened.family.attention_names(reader, layer) if "rotary_emb" not in name]
            attention |= planned_attention(reader, names, layer, first.heads, self._kv_heads, first.head_dim)
        tensors = unchanged_tensors(reader, opened.config)
        return {name: attention.get(name, spec) for name, spec in tensors.items()}


def requested_heads(settings: KVHeadsSettings, anatomy: AttentionAnatomy) -> int:
    """Compute the number of KV heads of every layer, from ``kv_heads`` or the ratio; by default at most half.

    Raises SurgeryError: the source has one KV head, or cannot be merged to this number.
    """
    heads = anatomy.kv_heads
    if heads == 1:
        raise SurgeryError("the source has one KV head already: convert --to mla instead")
    choices = _choices(heads)[:-1]
    ratio = DEFAULT_RATIO if settings.kv_ratio is None else settings.kv_ratio
    if settings.kv_heads is not None:
        if settings.kv_heads not in choices:
            raise SurgeryError(
                f"--kv-heads {settings.kv_heads}: the source's {heads} can be merged to {', '.join(map(str, choices))}"
            )
        return settings.kv_heads
    if settings.kv_ratio is None:
        return max(count for count in choices if count <= ratio * heads)
    nearest = min(choices, key=lambda count: abs(count - ratio * heads))
    if abs(nearest - ratio * heads) <= RATIO_TOLERANCE * nearest:
        return nearest
    if ratio * heads < 1:
        raise SurgeryError(
            f"--kv-ratio {ratio:g}: less than one of the source's {heads} KV heads; convert --to mla instead"
        )
    gives = ", ".join(f"{count / heads:.4g} gives {count}" for count in choices)
    raise SurgeryError(f"--kv-ratio {ratio:g}: does not give a divisor of the {heads} KV heads; {gives}")


def _choices(heads: int) -> list[int]:
    """List the divisors of the number of KV heads, ascending; the last is the number itself."""
    return [count for count in range(1, heads + 1) if heads % count == 0]


def half_the_heads(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Half of the KV heads."""
    plain = {**config.to_dict(), "num_key_value_heads": max(1, head_shape(config)[1] // 2)}
    return transformers.CONFIG_MAPPING[plain.pop("model_type")](**plain)
