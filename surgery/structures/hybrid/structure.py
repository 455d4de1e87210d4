"""``surgery convert --to hybrid``: some heads keep their whole context, the others sinks and recent tokens.

Nothing is fitted: heads are moved so that full ones come first, and the model class keeps the rest of a window only.
What the streaming heads lose is measured by carrying the source, and the source with their attention masked, through
held-out text side by side; the written files are loaded again, run through their caches and compared with the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import BoolTensor, Tensor

from surgery.architectures.hybrid import (
    REASON,
    StreamableModel,
    compensation_bytes,
    moved_tensors,
)
from surgery.architectures.own_class import MODEL_TYPE, layer_entries, own_config
from surgery.architectures.sliding_layers import CARRIERS
from surgery.calibration.held_out import Score
from surgery.calibration.texts import Texts
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.heads.import_patterns import read_pattern
from surgery.heads.pattern import HeadPattern, count_of
from surgery.heads.plan import HeadPlan, compile_plan
from surgery.heads.streaming import StreamingAttention, mixed_output
from surgery.model import SurgeryForCausalLM
from surgery.model.cache_layer import check_full_attention
from surgery.model.quantized_cache import QuantizedKVLayer
from surgery.model.token_codes import TokenCodes
from surgery.reporting.report import SourceShape
from surgery.running.attention_tap import AttentionCall, tapped
from surgery.running.layer_stream import StreamedLayer
from surgery.running.skeleton import skeleton
from surgery.running.source import OwnSource, Source
from surgery.structures.base import Candidate, Foreseen, LayerForm, Outcome, Request, Structure, kept_with_attention
from surgery.structures.estimates import Demand
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.ladder import ERROR_SEQUENCES
from surgery.structures.sequential_fit import SequentialFit
from surgery.structures.work import Work
from surgery.verification.flow import predicted_flow

STREAMING = "streaming"
"""The stage of a conversion in the ladder of the report, after the source."""

SINKS, RECENT = 64, 256
"""Of a plan without a pattern: what DuoAttention deploys."""


@dataclass(frozen=True)
class HybridLayerReport:
    """One layer of the report.

    Attributes:
        full_heads, streaming_heads, compensated_heads: KV heads of the source, by their places in it.
        scores: of its KV heads in the pattern; None without one.
        measured: relative error of what the layer adds to the hidden states, on the source's inputs, by stage.
    """

    layer: int
    full_heads: tuple[int, ...]
    streaming_heads: tuple[int, ...]
    compensated_heads: tuple[int, ...]
    scores: tuple[float, ...] | None
    measured: dict[str, float]

    @staticmethod
    def columns() -> tuple[str, ...]:
        """Heads of :meth:`cells`."""
        return "full heads", "streaming heads", "compensated"

    def cells(self) -> tuple:
        """For people."""
        kinds = (self.full_heads, self.streaming_heads, self.compensated_heads)
        return tuple(" ".join(map(str, heads)) or "-" for heads in kinds)


class Hybrid(Structure[Source | OwnSource, HybridSettings]):
    """Some heads keep their whole context, the others sinks and recent tokens."""

    beside_pictures = True
    requests = (
        Request(" --streaming 1", {"streaming": 1}, caution="every head forgets, surgery heads tells which may"),
    )

    def __init__(self, opened: Source | OwnSource, settings: HybridSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        if settings.heads is None and settings.streaming != 1:
            raise SurgeryError(
                "which heads stream is not said: make a pattern with `surgery heads CKPT` and give it with --heads, or "
                "let all stream with --streaming 1"
            )
        reader = opened.reader
        try:
            check_full_attention(opened.config, "a hybrid of full and streaming heads")
        except ValueError as error:
            raise SurgeryError(f"{reader.path}: {error}") from None
        model = self._made_of(StreamableModel.of(reader.path, reader.config, opened.config))
        self._pattern = None if settings.heads is None else read_pattern(settings.heads)
        self._context = settings.context or opened.config.max_position_embeddings
        if self._pattern is not None and self._pattern.model.get("sha256") not in (None, reader.fingerprint()):
            # A source's pattern serves what was made of it, and a fine-tuned model that of its base.
            progress.note(f"{settings.heads}: was made on other weights, those of {self._pattern.model.get('name')}")
        self._plan = plan_heads(model, self._pattern, settings, self._context, opened.weight_dtype.itemsize)
        self._entries = model.entries(self._plan)

    @classmethod
    def for_source(cls, config: Mapping[str, Any], settings: HybridSettings) -> type[Structure]:
        """Whole layers stream in a stock class."""
        if settings.granularity == "layer":
            from surgery.structures.hybrid.whole_layers import WholeLayers

            return WholeLayers
        return cls

    def _made_of(self, model: StreamableModel) -> StreamableModel:
        """What streams as one."""
        return model

    @classmethod
    def open(cls, reader: CheckpointReader, settings: HybridSettings) -> Source | OwnSource:
        """A checkpoint of a family, or of the own class with fewer KV heads, low-rank latents or MLA."""
        if reader.config.get("model_type") in (MODEL_TYPE, "deepseek_v3"):
            return OwnSource.open(reader, settings)
        return Source.of(reader, settings)

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """As many full heads as the budget holds, of the pattern that the plan is given, alone and in 8 and 4 bits; and
        whole layers where a stock class has both kinds."""
        if config["model_type"] == MODEL_TYPE:
            return []
        layers = [Candidate({"granularity": "layer"}, mixes=False)] if config["model_type"] in CARRIERS else []
        return [*(Candidate(coded) for coded in ({}, {"bits": 8}, {"bits": 4})), *layers]

    def closed_form(self, work: Work, layer: int, cache: QuantizedKVLayer | None) -> StreamingAttention:
        """The source's attention behind the plan's masks."""
        stream, plan = self.opened.stream, self._plan
        codes = None if cache is None else (cache, TokenCodes.of(self.settings.kv_cache()))
        anatomy = self.opened.anatomy(layer).to(stream.device, stream.dtype)
        return StreamingAttention(anatomy, plan.streams[layer], plan.sinks, plan.recent, plan.compensated[layer], codes)

    def layer_forms(
        self, work: Work, index: int, layer: StreamedLayer, anatomy: AttentionAnatomy, fit: SequentialFit | None
    ) -> list[LayerForm]:
        """Masked, with its heads in their new order."""
        return [LayerForm(self.closed_form(work, index, None), self._moved(index))]

    def foresee(self) -> Foreseen:
        """All of it, at the context that was asked for: nothing is left to the work but measuring."""
        opened, config = self.opened, own_config(self.opened.reader.config, self._entries)
        planned = skeleton(config, opened.weight_dtype)
        held = planned.kv_cache_bytes(1, self._context) / self._context
        return Foreseen(
            config=config,
            tensors=kept_with_attention(opened.reader, opened.config),
            kv_bytes_per_token=held,
            model_type=MODEL_TYPE,
            reasons=[REASON],
            demand=Demand(
                cached=round(held / opened.layers / opened.weight_dtype.itemsize), quantizes=self.settings.quantizes
            ),
        )

    def plan(self, work: Work) -> dict[str, TensorSpec]:
        """Every tensor stays; a layer's heads change places."""
        return kept_with_attention(self.opened.reader, self.opened.config)

    def convert_layers(self, work: Work, writer: CheckpointWriter) -> Outcome:
        """Measures the plan as masks on the source's attention, and writes heads in their new order."""
        opened, plan, pattern = self.opened, self._plan, self._pattern
        reader, dtype = opened.reader, opened.weight_dtype
        hidden, scores, errors = measure_plan(opened, plan, work.texts, self.settings, work.progress)
        for layer in work.layers():
            for name, tensor in self._moved(layer).items():
                writer.write(name, tensor)
        config = own_config(reader.config, self._entries)
        # The source in the own class, to know its bytes.
        whole = skeleton(own_config(reader.config, layer_entries(reader.config)), dtype)
        planned = skeleton(config, dtype)
        return Outcome(
            config=config,
            target={
                "to": "hybrid",
                "method": "streaming-llm" if pattern is None else pattern.method,
                "model_type": MODEL_TYPE,
                "reasons": [REASON],
                **_facts(plan, pattern, planned, whole, self._context, self.settings),
            },
            kv_bytes=lambda tokens: planned.kv_cache_bytes(1, tokens),
            layers=[layer_report(layer, plan, pattern, error) for layer, error in enumerate(errors)],
            scores=scores,
            simulated=hidden,
            own_class=True,
            shape=SourceShape.of_config(opened.config, dtype, whole.kv_cache_bytes(1, self._context) / self._context),
            flow=partial(predicted_flow, skeleton(config, opened.stream.dtype)),
        )

    def _moved(self, layer: int) -> dict[str, Tensor]:
        """Tensors of a layer whose heads change places."""
        if self._entries[layer] is None or self._entries[layer]["kind"] != "hybrid":
            return {}
        return moved_tensors(self.opened.reader, layer, self._plan.order(layer))


def plan_heads(
    model: StreamableModel, pattern: HeadPattern | None, settings: HybridSettings, context: int, itemsize: int
) -> HeadPlan:
    """The plan that settings ask for.

    Raises:
        SurgeryError: the pattern is another model's, or the budget is impossible.
    """
    shape = model.layers, model.kv_heads
    sinks, recent = settings.sinks, settings.recent
    if pattern is None:
        scores, default_sinks, default_recent = torch.zeros(shape), SINKS, RECENT
    else:
        scores, default_sinks, default_recent = pattern.scores, pattern.sinks, pattern.recent
        if tuple(scores.shape) != shape:
            raise SurgeryError(
                f"{settings.heads}: scores of {tuple(scores.shape)} layers and KV heads, and this model has {shape}: "
                "score this checkpoint itself with surgery heads"
            )
    sinks = default_sinks if sinks is None else sinks
    recent = default_recent if recent is None else recent
    if sinks is None or recent is None:
        raise SurgeryError(f"{settings.heads}: does not say for how many tokens; give --sinks and --window")
    if settings.compensated and any(unit.blocks or len(unit.heads) > 1 for found in model.units for unit in found):
        raise SurgeryError("compensated: latents have no key and value of a head to take the mean of; leave it at 0")
    kept, heads = sinks + recent - 1, scores.numel()
    everything = torch.ones(shape, dtype=torch.bool)
    ratio = 0.5 if settings.kv_ratio is None else settings.kv_ratio
    budget = ratio * model.bytes_at(everything, context, kept, itemsize)
    extra = settings.compensated * compensation_bytes(model.head_dim)

    def affordable(full: BoolTensor) -> bool:
        if settings.streaming is not None:
            return int(full.sum()) <= count_of(1 - settings.streaming, heads)
        return model.bytes_at(full, context, kept, itemsize, extra) <= budget

    units = [[unit.heads for unit in found] for found in model.units]
    plan = compile_plan(
        scores,
        units,
        affordable,
        sinks,
        recent,
        multiple=settings.heads_multiple,
        compensated=settings.compensated,
    )
    if plan.full.all():
        raise SurgeryError("no head streams under this budget: lower --kv-ratio, or leave the checkpoint as it is")
    return plan


@torch.no_grad()
def measure_plan(
    opened: Source | OwnSource, plan: HeadPlan, texts: Texts, settings: HybridSettings, progress: Progress
) -> tuple[Tensor, dict[str, Score], list[float]]:
    """Carries the source and the plan, as masks on the source's own attention, through the held-out text.

    Returns:
        Final hidden states [N, T, D] under the plan; loss and recall by stage; the error of each layer.
    """
    stream, batch = opened.stream, settings.batch_size
    source = stream.embed(texts.held_out.tokens)
    streaming, errors = source.clone(), []
    with progress.phase("measure", opened.layers) as advance:
        for index in range(opened.layers):
            inputs = source[:ERROR_SEQUENCES].clone()
            with stream.layer(index) as layer:
                with tapped(layer.model, _masked(plan, index)):
                    masked = stream.run_layer(layer, inputs.clone(), batch)
                    stream.run_layer(layer, streaming, batch)
                stream.run_layer(layer, source, batch)
            exact = source[:ERROR_SEQUENCES]
            errors.append(float((masked - exact).norm() / (exact - inputs).norm()))
            advance()
    states = {"source": source, STREAMING: streaming}
    return streaming, {name: texts.held_out.score(stream, hidden) for name, hidden in states.items()}, errors


def _masked(plan: HeadPlan, layer: int) -> Callable[[AttentionCall], Tensor]:
    """Attention of a layer under the plan; where all heads read one latent, the layer streams as a whole or not."""
    streams, compensated = plan.streams[layer], plan.compensated[layer]

    def attention(call: AttentionCall) -> Tensor:
        shared = call.kv_heads != len(streams)
        which = streams.all().expand(call.kv_heads) if shared else streams
        return mixed_output(call, which, plan.sinks, plan.recent, None if shared else compensated)

    return attention


def _facts(
    plan: HeadPlan,
    pattern: HeadPattern | None,
    planned: SurgeryForCausalLM,
    whole: SurgeryForCausalLM,
    context: int,
    settings: HybridSettings,
) -> dict:
    """What the report says of the plan."""
    return {
        "sinks": plan.sinks,
        "recent": plan.recent,
        "heads": plan.full.numel(),
        "full_heads": int(plan.full.sum()),
        "compensated_heads": int(plan.compensated.sum()),
        "heads_multiple": settings.heads_multiple,
        "context": context,
        "kv_ratio_at_context": planned.kv_cache_bytes(1, context) / whole.kv_cache_bytes(1, context),
        "pattern": None if pattern is None else pattern.identity(),
    }


def layer_report(layer: int, plan: HeadPlan, pattern: HeadPattern | None, error: float) -> HybridLayerReport:
    def heads(chosen: BoolTensor) -> tuple[int, ...]:
        return tuple(chosen[layer].nonzero().flatten().tolist())

    scores = None if pattern is None else tuple(pattern.scores[layer].tolist())
    plain = plan.streams & ~plan.compensated
    return HybridLayerReport(layer, heads(plan.full), heads(plain), heads(plan.compensated), scores, {STREAMING: error})
