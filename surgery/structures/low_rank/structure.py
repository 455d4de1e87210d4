"""``surgery convert --to lowrank``: latents in place of keys and values.

Two sweeps over calibration text gather statistics, and one budget is allocated as ranks. Then one pass converts every
layer and runs all stages through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from surgery.architectures.custom_class import MODEL_TYPE
from surgery.architectures.low_rank import REASON, OwnLowRank
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.human import short
from surgery.common.progress import Progress
from surgery.families import head_shape
from surgery.families.anatomy import AttentionAnatomy
from surgery.model.configuration_surgery import SurgeryConfig
from surgery.model.low_rank_entry import Block, LowRankEntry
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import StreamedLayer
from surgery.running.source import Source
from surgery.structures.base import Candidate, ConfigOf, Forecast, Outcome, Structure, TargetOption, replanned_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.kept_layers import kept_layers
from surgery.structures.low_rank.quantized import QuantizedRows
from surgery.structures.low_rank.rank_plan import Blocks, plan_ranks, requested_rank
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.passing import pass_kept, source_attention
from surgery.structures.refit import refitted_output
from surgery.structures.stages import StageTracker
from surgery.transforms.low_rank import low_rank_layer
from surgery.transforms.low_rank_layer import LowRankLayer, SimulatedLowRank
from surgery.transforms.low_rank_methods import blocks_for

BITS_CHOSEN = {"bits": "auto"}
OWN_METHODS = ("fisher", "separate")
LOW_RANK, RESIDUAL_WINDOW = "low rank", "exact window"
"""Stages of the report after the source: all tokens as latents, then latents next to a residual window."""


@dataclass(frozen=True)
class LowRankLayerReport:
    """Report of one layer.

    Attributes:
        ranks: rank of each block of latents; empty for an unchanged layer.
        key_error, value_error, error: predicted errors, see :class:`surgery.transforms.low_rank.LowRankConversion`.
        energies: energies of the latents in the method's metric, descending, block after block; used by slicing.
        measured: relative output error of the layer's attention on the source's inputs, by stage.
    """

    layer: int
    ranks: tuple[int, ...] = ()
    key_error: float | None = None
    value_error: float | None = None
    error: float | None = None
    energies: list[float] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "latents", "keys, predicted", "values, predicted"

    def cells(self) -> tuple:
        return " + ".join(map(str, self.ranks)) or "kept", short(self.key_error), short(self.value_error)


class LowRank(Structure[Source, LowRankSettings]):
    """Conversion to low-rank latents, from which keys and values are rebuilt."""

    name = "lowrank"
    supports_multimodal = True
    options = (
        TargetOption(option_rank=3),
        TargetOption(" --bits auto", BITS_CHOSEN, option_rank=0),
        TargetOption(" --kv-ratio 0.0625 --bits auto", {"kv_ratio": 0.0625, **BITS_CHOSEN}, listed=False),
    )

    def __init__(self, opened: Source, settings: LowRankSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.kept = kept_layers(settings.keep_layers, opened.windows, opened.fixed)
        requested_rank(settings, opened.first)
        if settings.window and any(window is not None for window in opened.windows):
            raise SurgeryError("--window: not supported for models with sliding-window layers; drop --window")
        if settings.window and self.kept:
            raise SurgeryError("--window: must apply to all layers; drop --window or --keep-layers")
        self._writes: OwnLowRank | None = None

    @classmethod
    def for_source(cls, config: Mapping[str, Any], settings: LowRankSettings) -> type[Structure]:
        """Return the class for the settings: packed rows with bits auto."""
        return QuantizedRows if settings.bits == "auto" else cls

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return the candidates: full-precision latents, and packed rows."""
        return [Candidate({}), Candidate(BITS_CHOSEN)]

    @classmethod
    def bench_configs(cls) -> dict[str, ConfigOf]:
        """Return the config with one latent for all KV heads of a layer."""
        return {"": one_latent}

    def forecast(self) -> Forecast:
        """Forecast the conversion; before :meth:`plan` with equal ranks in all layers."""
        opened, settings, first = self.opened, self.settings, self.opened.first
        rank = requested_rank(settings, first)
        writes = self._writes
        if writes is None:
            blocks = blocks_for(settings.method, first, rank)
            writes = self._writer(tuple(() if layer in self.kept else blocks for layer in range(opened.layers)))
        config, exact = writes.config(opened.reader.config), writes.sinks + writes.window
        bytes_at = kv_bytes_of(config, first.q.dtype)
        return Forecast(
            config=config,
            tensors=replanned_tensors(opened, writes.copied, writes.plan, self.kept),
            kv_bytes_per_token=bytes_at(exact + 1) - bytes_at(exact),
            model_type=MODEL_TYPE,
            reasons=[REASON],
            demand=Demand(stages=1 + bool(settings.window)),
        )

    def gather(self, work: ConversionContext) -> None:
        work.gather()

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        opened = self.opened
        self._blocks = plan_ranks(opened, work.library, self.settings, self.kept)
        self._writes = self._writer(self._blocks)
        return replanned_tensors(opened, self._writes.copied, self._writes.plan, self.kept)

    def _writer(self, blocks: tuple[Blocks, ...]) -> OwnLowRank:
        return OwnLowRank(self.opened.first, blocks, self.settings.sinks, self.settings.window)

    def closed_form(self, work: ConversionContext, layer: int) -> nn.Module:
        """Return a surrogate module of a layer's latents, without residual window."""
        if layer in self.kept:
            return source_attention(self.opened, layer)
        anatomy, statistics = self.opened.anatomy(layer).to(torch.float64), work.library.load(layer)[0]
        converted = low_rank_layer(anatomy, statistics, self._blocks[layer], self.settings.method).layer
        with self.opened.stream.layer(layer) as streamed:
            converted = self._refitted(work, layer, streamed, converted)
        converted = converted.to(self.opened.stream.device, self.opened.stream.dtype)
        return SimulatedLowRank(converted)

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Convert all layers, simulate them without and with the residual window, and write their tensors."""
        opened, writes = self.opened, self._writes
        stages = (LOW_RANK, *((RESIDUAL_WINDOW,) if self.settings.window else ()))
        runs = work.stage_runs(stages, steps=stages)
        reports = work.pass_layers(lambda index: self._convert(index, work, runs), runs, LowRankLayerReport)
        work.converted.write(opened.layers, writer)
        return Outcome(
            config=writes.config(opened.reader.config),
            target={
                "to": self.name,
                "method": self.settings.method,
                "model_type": MODEL_TYPE,
                "reasons": [REASON],
                "ranks": [writes.rank(layer) for layer in range(opened.layers)],
                "sinks": writes.sinks,
                "window": self.settings.window,
            },
            layers=reports,
            scores=runs.scores(),
            simulated=runs.hidden[stages[-1]],
            custom_class=True,
        )

    def _convert(self, index: int, work: ConversionContext, runs: StageTracker) -> LowRankLayerReport:
        if index in self.kept:
            pass_kept(self.opened, index, runs, work.converted)
            return LowRankLayerReport(index)
        stream, blocks = self.opened.stream, self._blocks[index]
        anatomy, statistics = self.opened.anatomy(index).to(torch.float64), work.library.load(index)[0]
        converted = low_rank_layer(anatomy, statistics, blocks, self.settings.method)
        with stream.layer(index) as layer:
            converted = replace(converted, layer=self._refitted(work, index, layer, converted.layer))
            errors = self._measure(layer, anatomy, converted.layer.to(stream.device, stream.dtype), runs)
        energies = torch.cat([e[: b.rank] for e, b in zip(converted.energies, blocks, strict=True)])
        work.converted.save(index, self._writes.tensors(index, converted.layer.to("cpu", torch.float64)))
        return LowRankLayerReport(
            index,
            tuple(block.rank for block in blocks),
            converted.key_error,
            converted.value_error,
            converted.error,
            energies.tolist(),
            errors,
        )

    def _refitted(
        self, work: ConversionContext, index: int, layer: StreamedLayer, converted: LowRankLayer
    ) -> LowRankLayer:
        """Refit a layer's output projection.

        Not for other methods than ours, which have none, and not with a residual window, which the refit would not see.
        """
        if self.settings.method not in OWN_METHODS or self.settings.window or self.settings.sinks:
            return converted
        form = converted.to(self.opened.stream.device, self.opened.stream.dtype)

        def attended(inputs: Tensor, batch: slice) -> Tensor:
            return form.source.gated(form.attend(inputs, form.latents(inputs)), inputs)

        o = refitted_output(work, index, layer, converted.source.o, attended)
        return replace(converted, source=replace(converted.source, o=o))

    def _measure(
        self, layer: StreamedLayer, anatomy: AttentionAnatomy, form: LowRankLayer, runs: StageTracker
    ) -> dict[str, float]:
        """Run all stages through the layer; return the relative error of each."""
        makers = {}
        for name in runs.hidden:
            if name == "source":
                continue
            window = {"sinks": self.settings.sinks, "window": self.settings.window} if name == RESIDUAL_WINDOW else {}
            module = SimulatedLowRank(form, **window)
            makers[name] = lambda module=module: module
        return runs.advance(layer, anatomy, makers, makers)


def one_latent(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Return a config with one latent of ``rank + rope_dim`` elements for keys and values of all KV heads."""
    heads = tuple(range(head_shape(config)[1]))
    entry = LowRankEntry(blocks=(Block(rank + rope_dim, heads, heads),))
    return SurgeryConfig.from_base(config, [entry.to_entry() for _ in range(config.num_hidden_layers)])
