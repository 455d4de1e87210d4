"""``surgery slice``: a smaller checkpoint from a converted one, by keeping the first latents of every block.

Needs no calibration: conversions order latents by energy. If ranks may differ between layers, a few allocations are
compared on held-out text. The slice is verified against the whole checkpoint with the dropped latents set to zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.architectures.sliced import LatentModel, Ranks, planned_tensors, sliced_tensors
from surgery.calibration.held_out import HeldOut, Score
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from surgery.checkpoint.file_kinds import REPORT
from surgery.common.human import share
from surgery.common.progress import Progress
from surgery.reporting.report import SourceShape, reading
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import LayerStream, StreamedLayer
from surgery.running.source import OwnSource
from surgery.structures.base import Forecast, Outcome, Structure
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.slices.plan import Origin, plan_slice
from surgery.structures.slices.settings import SliceSettings
from surgery.structures.stages import ERROR_SEQUENCES
from surgery.verification.written import measured_tokens


@dataclass(frozen=True)
class SlicedLayerReport:
    """Report of one layer.

    Attributes:
        rank, ranks: number of latents of the slice, and in each block.
        rope_error: None, as no rotary dimension is dropped.
        latent_error: energy of the dropped latents according to the conversion's report; its share of the energy.
        measured: relative error of the attention's output.
    """

    layer: int
    rank: int
    ranks: tuple[int, ...]
    rope_dim: int
    rope_error: None
    latent_error: float
    latent_error_share: float
    measured: dict[str, float]

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "rank", "rotated", "RoPE, predicted", "latent, predicted"

    def cells(self) -> tuple:
        return self.rank, self.rope_dim, share(self.rope_error), share(self.latent_error_share)


class Slice(Structure[OwnSource, SliceSettings]):
    """Slice of a result of ``--to lowrank`` or ``--to mla``: the first latents of every block."""

    supports_multimodal = True

    def __init__(self, opened: OwnSource, settings: SliceSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        path = opened.reader.path
        self._whole = LatentModel.of(opened.reader)
        with reading(path / REPORT):
            self._origin, itemsize = Origin.of(path), opened.weight_dtype.itemsize
            self._candidates = plan_slice(
                path, self._whole, self._origin, settings.kv_ratio, itemsize, settings.allocate
            )

    @classmethod
    def open(cls, reader: CheckpointReader, settings: SliceSettings) -> OwnSource:
        """Open a checkpoint of the custom model class."""
        return OwnSource.open(reader, settings)

    def forecast(self) -> Forecast:
        """Forecast the slice with the first candidate allocation; all candidates have the same KV bytes."""
        opened, ranks = self.opened, self._candidates[next(iter(self._candidates))]
        smaller, dtype = self._whole.sliced(ranks), opened.weight_dtype
        kv_bytes = kv_bytes_of(smaller.config, dtype)(1)
        return Forecast(
            config=smaller.config,
            tensors=planned_tensors(opened.reader, self._whole, ranks),
            kv_bytes_per_token=kv_bytes,
            model_type=smaller.config["model_type"],
            reasons=self._origin.target["reasons"],
            demand=Demand(len(self._candidates), calibrates=False),
        )

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        stream, held_out, size = self.opened.stream, work.texts.held_out, self.settings.batch_size
        self._measured = measure_slices(stream, self._whole, self._candidates, held_out, size, work.progress)
        self._ranks = self._candidates[self._measured.best]
        return planned_tensors(self.opened.reader, self._whole, self._ranks)

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        opened, whole, measured, origin = self.opened, self._whole, self._measured, self._origin
        for layer in work.layers("slice"):
            for name, tensor in sliced_tensors(opened.reader, whole, layer, self._ranks).items():
                writer.write(name, tensor)
        smaller, dtype = whole.sliced(self._ranks), opened.weight_dtype
        at = measured_tokens(work.texts.held_out.tokens.shape[1], opened.windows)
        before, after = (kv_bytes_of(model.config, dtype)(at) / at for model in (whole, smaller))
        return Outcome(
            config=smaller.config,
            target={**_target(smaller, origin, after), "allocations": measured.losses},
            layers=[_layer_report(layer, whole, smaller, origin, e) for layer, e in enumerate(measured.errors)],
            scores={BEFORE: measured.before, SLICED: measured.score},
            simulated=measured.hidden,
            custom_class=True,
            shape=SourceShape.of_config(opened.config, dtype, before),
        )


def _target(smaller: LatentModel, origin: Origin, bytes_per_token: float) -> dict:
    """Return the origin's report entry of the target with the new ranks."""
    ranks = [sum(blocks) for blocks in smaller.ranks]
    target = {**origin.target, "sliced": True, "ratio_to_original": bytes_per_token / origin.source_bytes}
    if "ranks" in target:
        target["ranks"] = ranks
    else:
        target["kv_lora_ranks"] = ranks
        target["kv_lora_rank"] = ranks[0] if len(set(ranks)) == 1 else None
    return target


def _layer_report(
    layer: int, whole: LatentModel, smaller: LatentModel, origin: Origin, errors: dict[str, float]
) -> SlicedLayerReport:
    ranks, before = smaller.ranks[layer], whole.ranks[layer]
    energies = origin.energies[layer]
    dropped = sum(float(energy[new:old].sum()) for energy, new, old in zip(energies, ranks, before, strict=True))
    total = sum(float(energy[:old].sum()) for energy, old in zip(energies, before, strict=True))
    share = dropped / max(total, 1e-300)
    return SlicedLayerReport(layer, sum(ranks), ranks, smaller.rope_dim(layer), None, dropped, share, errors)


BEFORE, SLICED = "before slicing", "sliced"
"""Stages in the report of a slice."""


@dataclass(frozen=True)
class MeasuredSlice:
    """Held-out losses of all candidates, None without text, and the score of the whole checkpoint.

    Of the best candidate: score, final hidden states [N, T, D] and errors by layer.
    """

    best: str
    losses: dict[str, float | None]
    before: Score
    score: Score
    hidden: Tensor
    errors: list[dict[str, float]]


def measure_slices(
    stream: LayerStream,
    whole: LatentModel,
    candidates: dict[str, Ranks],
    held_out: HeldOut,
    batch_size: int,
    progress: Progress,
) -> MeasuredSlice:
    """Run the whole model, with and without the latents that each candidate drops, over the text.

    The best candidate is that of the least loss, or the last one without text.
    """
    embedded = stream.embed(held_out.tokens)
    hidden = {name: embedded.clone() for name in candidates}
    errors: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
    with progress.phase("measure", whole.layers) as advance:
        for index in range(whole.layers):
            with stream.layer(index) as layer:
                inputs = embedded[:ERROR_SEQUENCES].clone().to(stream.device, stream.dtype)
                exact = _attention_output(layer, inputs)
                stream.run_layer(layer, embedded, batch_size)
                for name, ranks in candidates.items():
                    with _zeroed_rows(layer, whole.kept_rows(index, ranks)):
                        difference = _attention_output(layer, inputs) - exact
                        stream.run_layer(layer, hidden[name], batch_size)
                    errors[name].append({SLICED: float(difference.norm() / exact.norm())})
            advance()
    scores = {name: held_out.score(stream, states) for name, states in hidden.items()}
    losses = {name: score.loss for name, score in scores.items()}
    best = min(losses, key=losses.get) if held_out.texts else list(losses)[-1]
    return MeasuredSlice(best, losses, held_out.score(stream, embedded), scores[best], hidden[best], errors[best])


@torch.no_grad()
def _attention_output(layer: StreamedLayer, inputs: Tensor) -> Tensor:
    """Return the attention's output [B, T, D] in a loaded layer."""
    outputs: list[Tensor] = []
    hook = _attention(layer).register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    layer(inputs)
    hook.remove()
    return outputs[0]


@contextlib.contextmanager
def _zeroed_rows(layer: StreamedLayer, rows: tuple[int, ...]) -> Iterator[None]:
    """Zero all but these rows of the down projection of a loaded layer, for a ``with`` block."""
    down = _attention(layer).kv_down
    original = [parameter.clone() for parameter in down.parameters()]
    dropped = torch.ones(down.out_features, dtype=torch.bool, device=down.weight.device)
    dropped[list(rows)] = False
    with torch.no_grad():
        for parameter in down.parameters():
            parameter[dropped] = 0
        yield
        for parameter, tensor in zip(down.parameters(), original, strict=True):
            parameter.copy_(tensor)


def _attention(layer: StreamedLayer) -> nn.Module:
    return layer.model.layers[0].self_attn
