"""``surgery convert --to hybrid``: heads with full context next to streaming heads of sinks and recent tokens.

Needs no calibration. Full heads are moved to the front, and the model class caches only sinks and a window for the
others. The source runs on held-out text with and without masks, and the written files are compared with the masked run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import BoolTensor, Tensor

from surgery.architectures.custom_class import MODEL_TYPE, own_config
from surgery.architectures.hybrid import REASON, StreamableModel, moved_tensors
from surgery.calibration.held_out import Score
from surgery.calibration.texts import Texts
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.heads.import_patterns import read_pattern
from surgery.heads.pattern import HeadPattern, count_of
from surgery.heads.plan import HeadPlan, compile_plan
from surgery.heads.streaming import StreamingAttention, mixed_output
from surgery.model.cache_layer import check_full_attention
from surgery.model.hybrid_entry import HybridEntry
from surgery.reporting.report import SourceShape
from surgery.running.attention_tap import AttentionCall, tap_attention
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import OwnSource, Source
from surgery.structures.base import Candidate, Forecast, Outcome, Structure, TargetOption, unchanged_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.stages import ERROR_SEQUENCES


class Hybrid(Structure[Source | OwnSource, HybridSettings]):
    """Conversion to heads with full context next to streaming heads."""

    supports_multimodal = True
    options = (
        TargetOption(
            " --streaming 1",
            {"streaming": 1},
            caution="all heads stream; surgery heads finds the heads that tolerate it",
        ),
    )

    def __init__(self, opened: Source | OwnSource, settings: HybridSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        reader = opened.reader
        try:
            check_full_attention(opened.config, "a hybrid of full and streaming heads")
        except ValueError as error:
            raise SurgeryError(f"{error}: convert --to lowrank or mla instead") from None
        if settings.heads is None and settings.streaming != 1:
            raise SurgeryError(
                "no head pattern: create one with `surgery heads CKPT` and pass it with --heads, or let all heads "
                "stream with --streaming 1"
            )
        model = StreamableModel.of(reader.path, reader.config, opened.config)
        self._pattern = None if settings.heads is None else read_pattern(settings.heads)
        self._context = settings.context or opened.config.max_position_embeddings
        if self._pattern is not None and self._pattern.model.get("sha256") not in (None, reader.fingerprint()):
            # Allowed: a source's pattern fits its conversions, and a base model's pattern its fine-tuned models.
            progress.note(f"{settings.heads}: was scored on other weights, those of {self._pattern.model.get('name')}")
        self._plan = plan_heads(model, self._pattern, settings, self._context, opened.weight_dtype.itemsize)
        self._entries = model.entries(self._plan)

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return streaming heads as the candidate, for sources of a family."""
        return [] if config["model_type"] == MODEL_TYPE else [Candidate({})]

    @classmethod
    def open(cls, reader: CheckpointReader, settings: HybridSettings) -> Source | OwnSource:
        """Open a checkpoint of a supported family, of the custom model class or of stock ``deepseek_v3``."""
        if reader.config.get("model_type") in (MODEL_TYPE, "deepseek_v3"):
            return OwnSource.open(reader, settings)
        return Source.of(reader, settings)

    def forecast(self) -> Forecast:
        """Forecast the conversion at the context of the settings; the result does not depend on the text."""
        opened, config = self.opened, own_config(self.opened.reader.config, self._entries)
        kv_bytes = kv_bytes_of(config, opened.weight_dtype)(self._context) / self._context
        return Forecast(
            config=config,
            tensors=unchanged_tensors(opened.reader, opened.config),
            kv_bytes_per_token=kv_bytes,
            model_type=config["model_type"],
            reasons=[REASON],
            demand=Demand(calibrates=False),
        )

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Return the source's tensor specs; at most the order of the heads changes."""
        return unchanged_tensors(self.opened.reader, self.opened.config)

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Measure the plan as masks on the source's attention, and write the heads in their new order."""
        opened, plan, pattern, dtype = self.opened, self._plan, self._pattern, self.opened.weight_dtype
        config = own_config(opened.reader.config, self._entries)
        hidden, scores, errors = measure_plan(opened, plan, work.texts, self.settings, work.progress)
        kv_bytes, whole = (kv_bytes_of(each, dtype)(self._context) for each in (config, opened.reader.config))
        for layer in work.layers():
            if isinstance(self._entries[layer], HybridEntry):  # latents stay where they are
                for name, tensor in moved_tensors(opened.reader, layer, plan.order(layer)).items():
                    writer.write(name, tensor)
        return Outcome(
            config=config,
            target={
                "to": "hybrid",
                "method": "streaming-llm" if pattern is None else pattern.method,
                "model_type": config["model_type"],
                "reasons": [REASON],
                "sinks": plan.sinks,
                "recent": plan.recent,
                "heads": plan.full.numel(),
                "full_heads": int(plan.full.sum()),
                "context": self._context,
                "kv_ratio_at_context": kv_bytes / whole,
                "pattern": None if pattern is None else pattern.identity(),
            },
            layers=[layer_report(layer, plan, pattern, error) for layer, error in enumerate(errors)],
            scores=scores,
            simulated=hidden,
            custom_class=True,
            shape=SourceShape.of_config(opened.config, dtype, whole / self._context),
        )

    def closed_form(self, work: ConversionContext, layer: int) -> StreamingAttention:
        stream, plan = self.opened.stream, self._plan
        anatomy = self.opened.anatomy(layer).to(stream.device, stream.dtype)
        return StreamingAttention(anatomy, plan.streams[layer], plan.sinks, plan.recent)


STREAMING = "streaming"
"""Name of the stage after the source in the report."""

SINKS, RECENT = 64, 256
"""Default tokens of streaming heads without a pattern: the sizes that DuoAttention deploys."""


@dataclass(frozen=True)
class HybridLayerReport:
    """Report of one layer.

    Attributes:
        full_heads, streaming_heads: indices of the source's KV heads.
        scores: scores of the KV heads in the pattern; None without a pattern.
        measured: relative error of the layer's contribution to the hidden states, on the source's inputs, by stage.
    """

    layer: int
    full_heads: tuple[int, ...]
    streaming_heads: tuple[int, ...]
    scores: tuple[float, ...] | None
    measured: dict[str, float]

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "full heads", "streaming heads"

    def cells(self) -> tuple:
        return tuple(" ".join(map(str, heads)) or "-" for heads in (self.full_heads, self.streaming_heads))


def plan_heads(
    model: StreamableModel, pattern: HeadPattern | None, settings: HybridSettings, context: int, itemsize: int
) -> HeadPlan:
    """Compute the plan of full and streaming heads from the settings.

    Raises SurgeryError: the pattern does not fit the model, or no head streams.
    """
    shape = model.layers, model.kv_heads
    sinks, recent = settings.sinks, settings.recent
    if pattern is None:
        scores, default_sinks, default_recent = torch.zeros(shape), SINKS, RECENT
    else:
        scores, default_sinks, default_recent = pattern.scores, pattern.sinks, pattern.recent
        if tuple(scores.shape) != shape:
            raise SurgeryError(
                f"{settings.heads}: scores have shape {tuple(scores.shape)} (layers, KV heads), but this model has "
                f"{shape}: score this checkpoint with surgery heads"
            )
    sinks = default_sinks if sinks is None else sinks
    recent = default_recent if recent is None else recent
    if sinks is None or recent is None:
        raise SurgeryError(f"{settings.heads}: has no sinks and recent tokens; pass --sinks and --window")
    window, heads = sinks + recent - 1, scores.numel()
    everything = torch.ones(shape, dtype=torch.bool)
    ratio = 0.5 if settings.kv_ratio is None else settings.kv_ratio
    budget = ratio * model.bytes_at(everything, context, window, itemsize)

    def affordable(full: BoolTensor) -> bool:
        if settings.streaming is not None:
            return int(full.sum()) <= count_of(1 - settings.streaming, heads)
        return model.bytes_at(full, context, window, itemsize) <= budget

    units = [[unit.heads for unit in layer] for layer in model.units]
    plan = compile_plan(scores, units, affordable, sinks, recent)
    if plan.full.all():
        raise SurgeryError("no head streams with this budget: lower --kv-ratio, or use the source unchanged")
    return plan


@torch.no_grad()
def measure_plan(
    opened: Source | OwnSource, plan: HeadPlan, texts: Texts, settings: HybridSettings, progress: Progress
) -> tuple[Tensor, dict[str, Score], list[float]]:
    """Run the source, with and without the plan's attention masks, over the held-out text.

    Returns final hidden states [N, T, D] under the plan, loss and recall by stage, and the error of each layer.
    """
    stream, batch = opened.stream, settings.batch_size
    source = stream.embed(texts.held_out.tokens)
    streaming, errors = source.clone(), []
    with progress.phase("measure", opened.layers) as advance:
        for index in range(opened.layers):
            inputs = source[:ERROR_SEQUENCES].clone()
            with stream.layer(index) as layer:
                with tap_attention(layer.model, _masked(plan, index)):
                    masked = stream.run_layer(layer, inputs.clone(), batch)
                    stream.run_layer(layer, streaming, batch)
                stream.run_layer(layer, source, batch)
            exact = source[:ERROR_SEQUENCES]
            errors.append(float((masked - exact).norm() / (exact - inputs).norm()))
            advance()
    states = {"source": source, STREAMING: streaming}
    return streaming, {name: texts.held_out.score(stream, hidden) for name, hidden in states.items()}, errors


def _masked(plan: HeadPlan, layer: int) -> Callable[[AttentionCall], Tensor]:
    """Return a layer's attention under the plan; if all heads share a latent, the whole layer streams or none of it."""
    streams = plan.streams[layer]

    def attention(call: AttentionCall) -> Tensor:
        which = streams if call.kv_heads == len(streams) else streams.all().expand(call.kv_heads)
        return mixed_output(call, which, plan.sinks, plan.recent)

    return attention


def layer_report(layer: int, plan: HeadPlan, pattern: HeadPattern | None, error: float) -> HybridLayerReport:
    def heads(selection: BoolTensor) -> tuple[int, ...]:
        return tuple(selection[layer].nonzero().flatten().tolist())

    scores = None if pattern is None else tuple(pattern.scores[layer].tolist())
    return HybridLayerReport(layer, heads(plan.full), heads(plan.streams), scores, {STREAMING: error})
