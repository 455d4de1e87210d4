"""The plan of full and streaming heads from a pattern, and its simulation by attention masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import BoolTensor, Tensor

from surgery.architectures.hybrid import StreamableModel, compensation_bytes
from surgery.calibration.held_out import Score
from surgery.calibration.texts import Texts
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.heads.pattern import HeadPattern, count_of
from surgery.heads.plan import HeadPlan, compile_plan
from surgery.heads.streaming import mixed_output
from surgery.running.attention_tap import AttentionCall, tap_attention
from surgery.running.source import OwnSource, Source
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.stages import ERROR_SEQUENCES

STREAMING = "streaming"
"""Name of the stage after the source in the report."""

SINKS, RECENT = 64, 256
"""Default tokens of streaming heads without a pattern: the sizes that DuoAttention deploys."""


@dataclass(frozen=True)
class HybridLayerReport:
    """Report of one layer.

    Attributes:
        full_heads, streaming_heads, compensated_heads: indices of the source's KV heads.
        scores: scores of the KV heads in the pattern; None without a pattern.
        measured: relative error of the layer's contribution to the hidden states, on the source's inputs, by stage.
    """

    layer: int
    full_heads: tuple[int, ...]
    streaming_heads: tuple[int, ...]
    compensated_heads: tuple[int, ...]
    scores: tuple[float, ...] | None
    measured: dict[str, float]

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "full heads", "streaming heads", "compensated"

    def cells(self) -> tuple:
        kinds = (self.full_heads, self.streaming_heads, self.compensated_heads)
        return tuple(" ".join(map(str, heads)) or "-" for heads in kinds)


def plan_heads(
    model: StreamableModel, pattern: HeadPattern | None, settings: HybridSettings, context: int, itemsize: int
) -> HeadPlan:
    """Compute the plan of full and streaming heads from the settings.

    Raises SurgeryError: the pattern does not fit the model, compensated heads share a latent, or no head streams.
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
    if settings.compensated and any(unit.blocks or len(unit.heads) > 1 for layer in model.units for unit in layer):
        raise SurgeryError(
            "compensated: must be 0 for models with latents, which have no keys and values by head",
            setting="compensated",
        )
    window, heads = sinks + recent - 1, scores.numel()
    everything = torch.ones(shape, dtype=torch.bool)
    ratio = 0.5 if settings.kv_ratio is None else settings.kv_ratio
    budget = ratio * model.bytes_at(everything, context, window, itemsize)
    extra = settings.compensated * compensation_bytes(model.head_dim)

    def affordable(full: BoolTensor) -> bool:
        if settings.streaming is not None:
            return int(full.sum()) <= count_of(1 - settings.streaming, heads)
        return model.bytes_at(full, context, window, itemsize, extra) <= budget

    units = [[unit.heads for unit in layer] for layer in model.units]
    plan = compile_plan(scores, units, affordable, sinks, recent, settings.compensated)
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
    streams, compensated = plan.streams[layer], plan.compensated[layer]

    def attention(call: AttentionCall) -> Tensor:
        shared = call.kv_heads != len(streams)
        which = streams.all().expand(call.kv_heads) if shared else streams
        return mixed_output(call, which, plan.sinks, plan.recent, None if shared else compensated)

    return attention


def layer_report(layer: int, plan: HeadPlan, pattern: HeadPattern | None, error: float) -> HybridLayerReport:
    def heads(selection: BoolTensor) -> tuple[int, ...]:
        return tuple(selection[layer].nonzero().flatten().tolist())

    scores = None if pattern is None else tuple(pattern.scores[layer].tolist())
    plain = plan.streams & ~plan.compensated
    return HybridLayerReport(layer, heads(plan.full), heads(plain), heads(plan.compensated), scores, {STREAMING: error})
