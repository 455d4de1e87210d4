"""``surgery convert --to hybrid``: some heads keep their whole context, the others sinks and recent tokens.

Nothing is fitted: heads are moved so that full ones come first, and the model class keeps the rest of a window only.
What the streaming heads lose is measured by carrying the source, and the source with their attention masked, through
held-out text side by side; the written files are loaded again, run through their caches and compared with the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import BoolTensor, Tensor

from surgery.architectures.hybrid import (
    REASON,
    StreamableModel,
    compensation_bytes,
    moved_names,
    moved_tensors,
)
from surgery.architectures.own_class import MODEL_TYPE, layer_entries, own_config
from surgery.calibration.held_out import Score
from surgery.calibration.texts import Texts, load_texts
from surgery.checkpoint import CheckpointReader, CheckpointWriter
from surgery.checkpoint.output_place import settle_output
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.heads.import_patterns import read_pattern
from surgery.heads.pattern import HeadPattern, count_of
from surgery.heads.plan import HeadPlan, compile_plan
from surgery.heads.streaming import mixed_output
from surgery.model import SurgeryForCausalLM
from surgery.reporting.report import SourceShape
from surgery.running.attention_tap import AttentionCall, tapped
from surgery.running.skeleton import skeleton
from surgery.running.source import OwnSource, Source
from surgery.structures.converter import Conversion, Outcome, finish, unchanged_tensors
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.ladder import ERROR_SEQUENCES
from surgery.verify.flow import predicted_flow

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


def convert_to_hybrid(
    source: str | Path,
    out: str | Path | None = None,
    settings: HybridSettings | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Conversion:
    """Lets heads stream and writes the result as a Hugging Face checkpoint of the project's own class.

    Args:
        source: local folder or hub id: a checkpoint of a supported family, or of the own class with fewer KV heads,
            low-rank latents or MLA.
        out: folder to write; the source's name with "-hybrid" behind it by default.
        settings: which heads; by default all heads stream.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        command: what the user typed, for the report.
        progress: bars; silent if None.

    Raises:
        SurgeryError: bad input or an impossible request; nothing is left behind.
    """
    settings, progress = settings or HybridSettings(streaming=1), progress or Progress(silent=True)
    if settings.heads is None and settings.streaming != 1:
        raise SurgeryError(
            "which heads stream is not said: make a pattern with `surgery heads CKPT` and give it with --heads, or let "
            "all stream with --streaming 1"
        )
    opened, model = _open(source, settings, allow_pickle)
    reader, dtype = opened.reader, opened.weight_dtype
    out = settle_output(source, reader.source, out, "hybrid" + settings.suffix, overwrite=overwrite)
    pattern = None if settings.heads is None else read_pattern(settings.heads)
    context = settings.context or opened.config.max_position_embeddings
    if pattern is not None and pattern.model.get("sha256") not in (None, reader.fingerprint()):
        # A source's pattern serves what was made of it, and a fine-tuned model that of its base.
        progress.note(f"{settings.heads}: was made on other weights, those of {pattern.model.get('name')}")
    plan = plan_heads(model, pattern, settings, context, dtype.itemsize)
    entries = model.entries(plan)
    config = own_config(reader.config, entries)
    # The source in the own class, to know its bytes.
    whole = skeleton(own_config(reader.config, layer_entries(reader.config)), dtype)
    planned = skeleton(config, dtype)
    texts = load_texts(opened, settings, progress)

    tensors = unchanged_tensors(reader, opened.config)
    tensors = {name: spec for name, spec in tensors.items() if "rotary_emb." not in name}  # the config's own
    hybrid = [layer for layer, entry in enumerate(entries) if entry and entry["kind"] == "hybrid"]
    moved = {name for layer in hybrid for name in moved_names(reader, layer)}
    with CheckpointWriter(out, tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite) as writer:
        hidden, scores, errors = _measure(opened, plan, texts, settings, progress)
        with progress.phase("convert", opened.layers) as advance:
            for layer in range(opened.layers):
                if layer in hybrid:
                    for name, tensor in moved_tensors(reader, layer, plan.order(layer)).items():
                        writer.write(name, tensor)
                advance()
        outcome = Outcome(
            config=config,
            replaced=moved | (set(reader.names()) - set(tensors)),
            target={
                "to": "hybrid",
                "method": "streaming-llm" if pattern is None else pattern.method,
                "model_type": MODEL_TYPE,
                "reasons": [REASON],
                **_facts(plan, pattern, planned, whole, context, settings),
            },
            kv_bytes=lambda tokens: planned.kv_cache_bytes(1, tokens),
            layers=[_layer_report(layer, plan, pattern, error) for layer, error in enumerate(errors)],
            scores=scores,
            simulated=hidden,
            own_class=True,
            shape=_shape(opened, whole, dtype, context),
            flow=partial(predicted_flow, skeleton(config, opened.stream.dtype)),
        )
        report = finish(writer, tensors, opened, settings, texts, outcome, command, progress)
    return Conversion(writer.out, report)


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
        raise SurgeryError(f"{settings.heads}: does not say for how many tokens; give --sinks and --recent")
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


def _open(
    source: str | Path, settings: HybridSettings, allow_pickle: bool
) -> tuple[Source | OwnSource, StreamableModel]:
    """Opens a checkpoint whose heads can stream.

    Raises:
        SurgeryError: it cannot be read, or no head of it can.
    """
    from surgery.model.cache_layer import check_full_attention

    reader = CheckpointReader.open(source, allow_pickle=allow_pickle)
    if reader.config.get("model_type") in (MODEL_TYPE, "deepseek_v3"):
        opened = OwnSource.open(reader, settings)
    else:
        opened = Source.open(source, settings, allow_pickle=allow_pickle)
    model = StreamableModel.of(reader.path, reader.config, opened.config)
    try:
        check_full_attention(opened.config, "a hybrid of full and streaming heads")
    except ValueError as error:
        raise SurgeryError(f"{reader.path}: {error}") from None
    return opened, model


@torch.no_grad()
def _measure(
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


def _shape(opened: Source | OwnSource, whole: SurgeryForCausalLM, dtype: torch.dtype, tokens: int) -> SourceShape:
    return SourceShape.of_config(opened.config, dtype, whole.kv_cache_bytes(1, tokens) / tokens)


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


def _layer_report(layer: int, plan: HeadPlan, pattern: HeadPattern | None, error: float) -> HybridLayerReport:
    def heads(chosen: BoolTensor) -> tuple[int, ...]:
        return tuple(chosen[layer].nonzero().flatten().tolist())

    scores = None if pattern is None else tuple(pattern.scores[layer].tolist())
    plain = plan.streams & ~plan.compensated
    return HybridLayerReport(layer, heads(plan.full), heads(plain), heads(plan.compensated), scores, {STREAMING: error})
