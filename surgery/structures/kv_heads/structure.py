"""``surgery convert --to gqa`` and ``--to mqa``: fewer KV heads, in a plain checkpoint of the source's family.

Two sweeps over calibration text gather statistics; then one pass merges the heads of every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from surgery.architectures.own_family import (
    attention_tensors,
    choose_carrier,
    config_with_query_heads,
    has_head_dim,
    planned_attention,
)
from surgery.calibration.library import StatisticsLibrary
from surgery.calibration.statistics import LayerStatistics
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.human import short
from surgery.common.progress import Progress
from surgery.engines.table import refuse_unless_loadable
from surgery.families import head_shape
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.attention import CapturedAttention, attend
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import StreamedLayer
from surgery.running.source import Source
from surgery.structures.base import Candidate, ConfigOf, Forecast, Outcome, Structure, unchanged_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.refit import refitted_output
from surgery.structures.stages import StageTracker
from surgery.transforms.key_norm import deal_queries, pad_groups, padded_group, pooled_key_norms
from surgery.transforms.kv_heads import MergedLayer, merge_kv_heads

MERGED = "merged"

DEFAULT_RATIO = 0.5
RATIO_TOLERANCE = 0.02
"""Relative tolerance when a ratio is matched to a number of heads, so that 0.33 selects two of six."""


@dataclass(frozen=True)
class HeadsLayerReport:
    """Report of one layer.

    Attributes:
        groups: the source's KV heads that each KV head replaces.
        key_error, value_error: predicted errors; None for method key-norm, which reassigns query heads.
        measured: relative output error of the layer's attention on the source's inputs, at the merged stage.
        queries: number of query heads of each KV head, for method key-norm.
    """

    layer: int
    groups: tuple[tuple[int, ...], ...]
    key_error: float | None
    value_error: float | None
    measured: dict[str, float]
    queries: tuple[int, ...] | None = None

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "merged KV heads", "keys, predicted", "values, predicted"

    def cells(self) -> tuple:
        groups = "  ".join("+".join(map(str, group)) for group in self.groups)
        return groups, short(self.key_error), short(self.value_error)


@dataclass(frozen=True)
class _Plan:
    """Heads of the result: KV heads, query heads, and query heads of each KV head by layer if these differ."""

    kv_heads: int
    heads: int
    queries: list[list[int]] | None = None


class KVHeads(Structure[Source, KVHeadsSettings]):
    """Conversion to fewer KV heads, the same number in every layer."""

    keeps_class = True

    def __init__(self, opened: Source, settings: KVHeadsSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        config = opened.reader.config
        if opened.reader.stored_names:
            _check_multimodal(opened.reader.stored_as, settings)
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
        if settings.method == "key-norm" and self._kv_heads > 1 and not has_head_dim(opened.config):
            raise SurgeryError(
                f"method key-norm adds query heads, and {config['model_type']} configs have no head_dim, which "
                "would be needed to keep their size: choose another method",
                setting="method",
            )

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return one candidate for every smaller number of heads that divides the source's."""
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        return [Candidate({"kv_heads": count}, scales=False) for count in _choices(heads)[:-1]]

    @classmethod
    def bench_configs(cls) -> dict[str, ConfigOf]:
        return {"": half_the_heads}

    def forecast(self) -> Forecast:
        """Forecast the conversion; the number of heads does not depend on the calibration."""
        opened, first = self.opened, self.opened.first
        carrier = choose_carrier(opened.reader.config, opened.layers, self._kv_heads)
        return Forecast(
            config=carrier.config,
            tensors=_planned_tensors(opened, _Plan(self._kv_heads, first.heads), first.head_dim),
            kv_bytes_per_token=kv_bytes_of(opened.reader.config, first.q.dtype)(1) // first.kv_heads * self._kv_heads,
            model_type=carrier.model_type,
            reasons=[carrier.reason],
            demand=Demand(),
        )

    def gather(self, work: ConversionContext) -> None:
        """Gather statistics with gradients: predicted errors use the metric of the loss for every method."""
        work.gather()

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Assign query heads to the KV heads and choose the target class."""
        opened, settings, first = self.opened, self.settings, self.opened.first
        self._plan = _plan_heads(opened, self._kv_heads, work.library, settings)
        config = opened.reader.config
        if self._plan.heads != first.heads:
            config = config_with_query_heads(config, self._plan.heads, first.head_dim)
        self._carrier = choose_carrier(config, opened.layers, self._kv_heads)
        if settings.engine is not None:
            refuse_unless_loadable(settings.engine, self._carrier.config)
        return _planned_tensors(opened, self._plan, first.head_dim)

    def closed_form(self, work: ConversionContext, layer: int) -> nn.Module:
        anatomy, stream = self.opened.anatomy(layer).to(torch.float64), self.opened.stream
        merged = _merge(anatomy, work.library.load(layer)[0], self._kv_heads, self.settings.method).anatomy
        with stream.layer(layer) as streamed:
            merged = self._refitted(work, layer, streamed, merged)
        return CapturedAttention(merged.to(stream.device, stream.dtype))

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        carrier = self._carrier
        runs = work.stage_runs((MERGED,), steps=(MERGED,))
        reports = work.pass_layers(lambda index: self._merge(index, work, runs), runs, HeadsLayerReport)
        work.converted.write(self.opened.layers, writer)
        return Outcome(
            config=carrier.config,
            target={
                "to": "mqa" if self._kv_heads == 1 else "gqa",
                "method": self.settings.method,
                "model_type": carrier.model_type,
                "reasons": [carrier.reason],
                "kv_heads": self._kv_heads,
            },
            layers=reports,
            scores=runs.scores(),
            simulated=runs.hidden[MERGED],
            custom_class=carrier.custom_class,
        )

    def _merge(self, index: int, work: ConversionContext, runs: StageTracker) -> HeadsLayerReport:
        stream, plan = self.opened.stream, self._plan
        source = self.opened.anatomy(index)
        anatomy, statistics = source.to(torch.float64), work.library.load(index)[0]
        merged, queries = _merge(anatomy, statistics, self._kv_heads, self.settings.method), None
        if plan.queries is not None:
            queries = tuple(plan.queries[index])
            padded = pad_groups(merged.anatomy, queries, plan.heads // len(queries))
            merged = replace(merged, anatomy=padded, key_error=None, value_error=None)
        with stream.layer(index) as layer:
            merged = replace(merged, anatomy=self._refitted(work, index, layer, merged.anatomy))
            attention = CapturedAttention(merged.anatomy.to(stream.device, stream.dtype))
            errors = runs.advance(layer, anatomy, {MERGED: lambda: attention}, (MERGED,))
        work.converted.save(index, attention_tensors(merged.anatomy.to("cpu", source.q.dtype), index))
        return HeadsLayerReport(index, merged.groups, merged.key_error, merged.value_error, errors, queries)

    def _refitted(
        self, work: ConversionContext, index: int, layer: StreamedLayer, merged: AttentionAnatomy
    ) -> AttentionAnatomy:
        """Refit a layer's output projection; other methods than ours have none."""
        if self.settings.method != "fisher":
            return merged
        form = merged.to(self.opened.stream.device, self.opened.stream.dtype)

        def attended(inputs: Tensor, _: slice) -> Tensor:
            return form.gated(attend(form, form.project(inputs)), inputs)

        return replace(merged, o=refitted_output(work, index, layer, merged.o, attended))


def _check_multimodal(model_type: str, settings: KVHeadsSettings) -> None:
    """Raise SurgeryError if the result would not keep the source's class, which includes the vision tower."""
    options = {
        "--method key-norm": settings.method == "key-norm",
        "--engine": settings.engine is not None,
    }
    for option, is_set in options.items():
        if is_set:
            raise SurgeryError(
                f"{option}: not supported for a vision-language model ({model_type}), which keeps its class and the "
                "same heads in every layer, and runs in transformers only. Drop the option"
            )


def requested_heads(settings: KVHeadsSettings, anatomy: AttentionAnatomy) -> int:
    """Compute the number of KV heads of a layer, from ``kv_heads`` or the ratio; by default at most half.

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


def _plan_heads(opened: Source, kv_heads: int, library: StatisticsLibrary, settings: KVHeadsSettings) -> _Plan:
    """Plan the heads of all layers; for method key-norm, assign query heads to KV heads."""
    first = opened.first
    if settings.method != "key-norm":
        return _Plan(kv_heads, first.heads)
    queries = [
        deal_queries(pooled_key_norms(opened.anatomy(layer), library.load(layer)[0], kv_heads), first.heads)
        for layer in range(opened.layers)
    ]
    size = first.heads // kv_heads
    if any(set(counts) != {size} for counts in queries):
        size = padded_group(max(map(max, queries)), kv_heads, first.hidden)
    return _Plan(kv_heads, kv_heads * size, queries)


def _merge(anatomy: AttentionAnatomy, statistics: LayerStatistics, kv_heads: int, method: str) -> MergedLayer:
    return merge_kv_heads(anatomy, statistics, kv_heads, "mean-pool" if method == "key-norm" else method)


def _planned_tensors(opened: Source, plan: _Plan, head_dim: int) -> dict[str, TensorSpec]:
    reader = opened.reader
    attention: dict[str, TensorSpec] = {}
    for layer in range(opened.layers):
        # Old checkpoints may store rotary frequencies, which follow from the config.
        names = [name for name in opened.family.attention_names(reader, layer) if "rotary_emb" not in name]
        attention |= planned_attention(reader, names, layer, plan.heads, plan.kv_heads, head_dim)
    tensors = unchanged_tensors(reader, opened.config)
    return {name: attention.get(name, spec) for name, spec in tensors.items()}


def half_the_heads(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Half of the KV heads."""
    plain = {**config.to_dict(), "num_key_value_heads": max(1, head_shape(config)[1] // 2)}
    return transformers.CONFIG_MAPPING[plain.pop("model_type")](**plain)
