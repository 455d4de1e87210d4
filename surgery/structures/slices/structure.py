"""``surgery slice``: a smaller checkpoint from a converted one, by keeping the first latents of every block.

Needs no calibration: conversions order latents by energy, so that the first ones form a good model. If ranks may differ
between layers, a few allocations are compared on held-out text. The written slice is verified against the whole
checkpoint with the dropped latents set to zero before it is moved to its final path.
"""

from __future__ import annotations

from dataclasses import dataclass

from surgery.architectures.sliced import LatentModel, planned_tensors, sliced_tensors
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from surgery.checkpoint.file_kinds import REPORT
from surgery.common.human import share
from surgery.common.progress import Progress
from surgery.reporting.report import SourceShape, reading
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import OwnSource
from surgery.structures.base import Forecast, Outcome, Structure
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.slices.measure import BEFORE, SLICED, measure_slices
from surgery.structures.slices.plan import Origin, plan_slice
from surgery.structures.slices.settings import SliceSettings
from surgery.verification.written import measured_tokens


@dataclass(frozen=True)
class SlicedLayerReport:
    """Report of one layer.

    Attributes:
        rank: number of latents of the slice.
        ranks: number of latents in each block.
        rope_dim: rotary dimensions that are cached next to the latents.
        rope_error: None, as no rotary dimension is dropped.
        latent_error: energy of the dropped latents according to the conversion's report.
        latent_error_share: ``latent_error`` relative to the energy before slicing.
        measured: relative error of the attention's output. In a group of layers that read each other's latents, the
            inputs already contain the errors of earlier layers.
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
        """Return the column heads of :meth:`cells`."""
        return "rank", "rotated", "RoPE, predicted", "latent, predicted"

    def cells(self) -> tuple:
        """Return the values of the layer's row in the printed table."""
        return self.rank, self.rope_dim, share(self.rope_error), share(self.latent_error_share)


class Slice(Structure[OwnSource, SliceSettings]):
    """Slice of a result of ``--to lowrank``, ``crosslayer`` (cascade) or ``mla``: the first latents of every block."""

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
        """Open a checkpoint of the custom model class or of stock MLA."""
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
            demand=Demand(cached=round(kv_bytes / opened.layers / dtype.itemsize), results=len(self._candidates)),
        )

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Measure the candidate allocations and choose the best."""
        stream, held_out, size = self.opened.stream, work.texts.held_out, self.settings.batch_size
        self._measured = measure_slices(stream, self._whole, self._candidates, held_out, size, work.progress)
        self._ranks = self._candidates[self._measured.best]
        return planned_tensors(self.opened.reader, self._whole, self._ranks)

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Slice and write the tensors of every layer."""
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
            custom_class=not whole.stock,
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
