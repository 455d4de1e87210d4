"""``surgery convert --to crosslayer``, methods xkv and minicache: layers share one cache of old tokens.

Only the static basis of xkv needs statistics. Every tensor of the source is kept, since recent tokens are cached and
read as in the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from surgery.architectures.cross_layer import REASON, OwnCrossLayer
from surgery.architectures.custom_class import MODEL_TYPE
from surgery.calibration.cross_layer_statistics import joint_moment
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.human import short
from surgery.common.progress import Progress
from surgery.families import LATENT_FAMILIES, any_family_of
from surgery.families.base import ATTENTION_PREFIX
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.families.latent_family import NORM
from surgery.model.cross_layer_entry import CrossLayerEntry, GroupEntry, MergedPairEntry, SharedMLAEntry
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import LayerStream, StreamedBlock
from surgery.running.source import Source
from surgery.structures.base import LONG, Candidate, Forecast, Outcome, Structure, unchanged_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.cross_layer.cascade import Cascade, QuantizedCascade
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.estimates import Demand
from surgery.structures.stages import StageTracker
from surgery.transforms.cross_layer import Rebuild, SharedBasis, SimulatedGroup, loss_metric, merged_pair, shared_basis

# MiniCache's interpolation t and share of unmerged tokens: arXiv:2405.14366, section 5.
INTERPOLATION, RETENTION = 0.6, 0.05


class CrossLayer(Structure[Source, CrossLayerSettings]):
    """Conversion to a cache of old tokens that a group of adjacent layers shares: methods xkv and minicache."""

    takes_latents = True

    def __init__(self, opened: Source, settings: CrossLayerSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self._groups, self._entries = plan_groups(opened, settings)
        first = opened.first
        self._latent = isinstance(first, LatentAnatomy)
        width = first.rank if self._latent else first.kv_width
        self._writes = OwnCrossLayer(self._groups, self._entries, (width,) * opened.layers, first.q.dtype)

    @classmethod
    def for_source(cls, config: Mapping[str, Any], settings: CrossLayerSettings) -> type[Structure]:
        """Return the class for the method: a cascade, or this class."""
        if settings.method == "cascade":
            return QuantizedCascade if settings.bits == "auto" else Cascade
        return cls

    @classmethod
    def open(cls, reader: CheckpointReader, settings: CrossLayerSettings) -> Source:
        """Open a checkpoint of a supported family, including MLA families for method xkv."""
        if reader.config["model_type"] == MODEL_TYPE:
            raise SurgeryError.at(reader.source, "its layers are converted already; convert its source --to crosslayer")
        if settings.method != "xkv" and reader.config["model_type"] in LATENT_FAMILIES:
            raise SurgeryError.at(reader.source, f"latents are shared with method xkv only, not {settings.method}")
        return Source.of(reader, settings, any_family_of(reader.config))

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return the candidates: a shared basis, and for sources without MLA a quantized cascade."""
        cascade = [] if config["model_type"] in LATENT_FAMILIES else [Candidate({"method": "cascade", "bits": "auto"})]
        return [Candidate({}), *cascade]

    def group(self, layer: int) -> range:
        return next((range(*span) for span in self._groups if layer in range(*span)), range(layer, layer + 1))

    def pass_group(self, work: ConversionContext, group: range, hidden: torch.Tensor) -> torch.Tensor:
        """Run hidden states through the layers of a group, with old tokens rebuilt from the basis of method xkv."""
        entry = self._entries[self._groups.index((group.start, group.stop))]
        basis = self._basis(work, group.start, group.stop, entry.rank)
        with self.opened.stream.block(group.start, group.stop) as layers:
            simulated = self._simulated(layers, group.start, group.stop, basis.to(*self._to_args).rebuild)
            _run(self.opened.stream, layers, simulated, hidden, self.settings.batch_size)
        return hidden

    def forecast(self) -> Forecast:
        """Forecast the conversion; config and shapes do not depend on the calibration."""
        opened, config = self.opened, self._writes.config(self.opened.reader.config)
        return Forecast(
            config=config,
            tensors=unchanged_tensors(opened.reader, opened.config) | self._writes.plan(),
            kv_bytes_per_token=kv_bytes_of(config, opened.weight_dtype)(LONG) / LONG,
            model_type=MODEL_TYPE,
            reasons=[REASON],
            demand=Demand(calibrates=self.settings.method == "xkv"),
        )

    def gather(self, work: ConversionContext) -> None:
        if self.settings.method != "xkv":
            return
        if work.texts.calibration is None:
            raise SurgeryError("method xkv requires calibration text: drop --calibration none", setting="method")
        work.gather()

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Return the source's tensors and the added bases; the groups are fixed at construction."""
        return unchanged_tensors(self.opened.reader, self.opened.config) | self._writes.plan()

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Compute the basis of every group, run the stages through the group and write the basis."""
        opened, settings = self.opened, self.settings
        config, pieces = self._writes.config(opened.reader.config), _pieces(self._groups, opened.layers)
        runs, reports = work.stage_runs((SHARED,)), []
        with work.progress.phase("convert", opened.layers) as advance:
            for start, stop in pieces:
                group = next((i for i, span in enumerate(self._groups) if span == (start, stop)), None)
                basis, report = self._convert(start, stop, None if group is None else self._entries[group], work, runs)
                if basis is not None:
                    for name, tensor in self._new_tensors(group, basis).items():
                        writer.write(name, tensor)
                reports += [report] if report else []
                advance(stop - start)
        return Outcome(
            config=config,
            target={
                "to": "crosslayer",
                "method": settings.method,
                "model_type": MODEL_TYPE,
                "reasons": [REASON],
                "groups": [list(span) for span in self._groups],
                "ranks": [report.ranks[0] for report in reports],
                "sinks": settings.sinks,
                "window": settings.window,
                "block": settings.block,
            },
            layers=reports,
            scores=runs.scores(),
            simulated=runs.hidden[SHARED],
            custom_class=True,
        )

    def _new_tensors(self, group: int, basis: SharedBasis) -> dict[str, torch.Tensor]:
        """Return the new tensors of a group, for MLA scaled to cached latents, which include the norm's weight."""
        opened, layers = self.opened, range(*self._groups[group])
        if not self._latent:
            return self._writes.tensors(group, basis, [opened.anatomy(index) for index in layers])
        names = [f"{ATTENTION_PREFIX.format(layer=index)}{NORM}.weight" for index in layers]
        return self._writes.latent_tensors(group, basis, [opened.reader.tensor(name).double() for name in names])

    def _convert(
        self, start: int, stop: int, entry: GroupEntry | None, work: ConversionContext, runs: StageTracker
    ) -> tuple[SharedBasis | None, GroupReport | None]:
        """Convert one group, or run the stages through a layer outside all groups, whose ``entry`` is None."""
        basis, rebuild = None, None
        if isinstance(entry, MergedPairEntry):
            rebuild = merged_pair(self.opened.first.kv_heads, entry.kept, entry.interpolation)
        elif entry is not None:
            basis = self._basis(work, start, stop, entry.rank)
            rebuild = basis.to(*self._to_args).rebuild
        measured, errors = self._run_stages(start, stop, rebuild, runs)
        if entry is None:
            return None, None
        error = None if basis is None else basis.error
        return basis, GroupReport(f"{start}-{stop - 1}", (self._cached_elements(entry),), 0, *errors, error, measured)

    def _basis(self, work: ConversionContext, start: int, stop: int, rank: int) -> SharedBasis:
        """Compute the basis of method xkv from calibration text."""
        moment = joint_moment(self.opened, work.store, start, stop, self.settings.batch_size)
        rotary_width = self.opened.first.head_dim if self._latent else 0
        metrics = [loss_metric(work.library.load(index)[0], rotary_width) for index in range(start, stop)]
        return shared_basis(moment, metrics, rank)

    @property
    def _to_args(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype in which layers run."""
        return self.opened.stream.device, self.opened.stream.dtype

    def _simulated(self, layers: StreamedBlock, start: int, stop: int, rebuild: Rebuild) -> SimulatedGroup:
        sources = [self.opened.anatomy(index).to(*self._to_args) for index in range(start, stop)]
        recent = {"sinks": self.settings.sinks, "window": self.settings.window}
        return SimulatedGroup.of(sources, rebuild, self.settings.block, **recent)

    def _cached_elements(self, entry: GroupEntry) -> int:
        if isinstance(entry, MergedPairEntry):
            anatomy = self.opened.first
            return anatomy.kv_width + 4 * anatomy.kv_heads
        return entry.rank

    @torch.no_grad()
    def _run_stages(
        self, start: int, stop: int, rebuild: Rebuild | None, runs: StageTracker
    ) -> tuple[dict[str, float], tuple[float, float]]:
        """Run every stage through a group; return the errors of its output by stage, and of keys and values."""
        stream, settings, hidden = self.opened.stream, self.settings, runs.hidden
        errors, group_errors = {}, (0.0, 0.0)
        with stream.block(start, stop) as layers:
            if rebuild is not None:
                sample = runs.sample()
                group = self._simulated(layers, start, stop, rebuild)
                expected = layers(sample)
                difference = group.run(layers, sample) - expected
                group_errors = group.errors() * (2 if self._latent else 1)  # a latent is keys and values
                errors[SHARED] = float(difference.norm() / (expected - sample).norm())
                _run(stream, layers, group, hidden[SHARED], settings.batch_size)
            else:
                stream.run_layer(layers, hidden[SHARED], settings.batch_size)
            stream.run_layer(layers, hidden["source"], settings.batch_size)
        return errors, group_errors


def plan_groups(
    opened: Source, settings: CrossLayerSettings
) -> tuple[tuple[tuple[int, int], ...], tuple[GroupEntry, ...]]:
    """Return the groups of a conversion, and the config entries of their first layers.

    The last group is smaller if ``group_size`` does not divide the layers. MiniCache merges pairs of layers in the
    deeper half of the model. Raises SurgeryError: the family or a layer does not support a shared cache, the budget is
    impossible, or the method does not have a setting.
    """
    if not opened.family.forwards_kwargs:
        raise SurgeryError(
            f"{opened.family.model_type} layers pass no keyword arguments to their attention, which a shared cache "
            "needs: convert --to lowrank instead"
        )
    for layer, window in enumerate(opened.windows):
        if layer in opened.stateful or window is not None:
            what = "has a recurrent state" if layer in opened.stateful else "has a sliding window"
            raise SurgeryError(
                f"layers that share latents need full attention, but layer {layer} {what}: convert --to lowrank instead"
            )
    if opened.family.first_scaled(opened.config) is not None:
        raise SurgeryError(
            f"{opened.family.model_type} scales queries by position, which layers with a shared cache do not "
            "support: convert --to lowrank instead"
        )
    recent = {"block": settings.block, "sinks": settings.sinks, "window": settings.window}
    if settings.method == "minicache":
        if settings.kv_ratio is not None or settings.rank is not None:
            raise SurgeryError(
                "method minicache has a fixed ratio, as it merges all layer pairs of the deeper half; drop kv_ratio",
                setting="method",
            )
        start = opened.layers // 2
        groups = tuple((first, first + 2) for first in range(start, opened.layers - 1, 2))
        if not groups:
            raise SurgeryError("method minicache needs a model of two layers or more", setting="method")
        kept_tokens = round(RETENTION * settings.block)
        entry = MergedPairEntry(group_size=2, **recent, kept=kept_tokens, interpolation=INTERPOLATION, index_in_group=0)
        return groups, (entry,) * len(groups)
    size, layers = settings.layers_per_group, opened.layers
    groups = tuple((first, min(first + size, layers)) for first in range(0, layers, size))
    entries = []
    first = opened.first
    latent = isinstance(first, LatentAnatomy)
    rotary_width = first.head_dim if latent else 0
    for start, stop in groups:
        count = stop - start
        rank = shared_rank((first.kv_width - rotary_width) * count, count, settings, rotary_width * count)
        kind = SharedMLAEntry if latent else CrossLayerEntry
        entries.append(kind(group_size=count, rank=rank, **recent, index_in_group=0))
    return groups, tuple(entries)


def _pieces(groups: tuple[tuple[int, int], ...], layers: int) -> list[tuple[int, int]]:
    """Return the groups, and every layer outside them as a span of one, in order."""
    inside = {index for start, stop in groups for index in range(start, stop)}
    return sorted([*groups, *((index, index + 1) for index in range(layers) if index not in inside)])


def _run(
    stream: LayerStream, layers: StreamedBlock, group: SimulatedGroup, hidden: torch.Tensor, batch_size: int
) -> None:
    """Apply a simulated group to hidden states [N, T, D], in place."""
    for rows in hidden.split(batch_size):
        rows.copy_(group.run(layers, rows.to(stream.device, stream.dtype)))


def shared_rank(full: int, layers: int, settings: CrossLayerSettings, rotary_elements: int = 0) -> int:
    """Compute the elements per token that a group of ``layers`` shares, in place of the ``full`` that they cache.

    The ratio (default 0.5 for MLA, else 0.25) includes the ``rotary_elements`` of MLA's keys, which stay unchanged.
    Raises SurgeryError: the rank is less than 1 or not less than ``full``.
    """
    ratio = (0.5 if rotary_elements else 0.25) if settings.kv_ratio is None else settings.kv_ratio
    rank = settings.rank * layers if settings.rank else int(ratio * (full + rotary_elements) + 1e-9) - rotary_elements
    if not 1 <= rank < full:
        stays = f" next to {rotary_elements} of rotary keys, which stay" if rotary_elements else ""
        raise SurgeryError(
            f"{rank} elements per token for {layers} layers: must be fewer "
            f"than the source's {full}{stays}, and at least one"
        )
    return rank


SHARED = "shared"
"""Name of the stage after the source in the report."""


@dataclass(frozen=True)
class GroupReport:
    """Report of one group of layers, "first-last".

    Attributes:
        ranks: elements per token that the group caches for tokens outside the full-precision ones.
        shared_rank: elements that other groups read; 0.
        key_error, value_error: relative squared error of rebuilt keys and values on held-out text.
        error: predicted relative error in the metric of the loss; None if there is no prediction.
        measured: relative error of the group's contribution to the hidden states, on the source's inputs, by stage.
    """

    layer: str
    ranks: tuple[int, ...]
    shared_rank: int
    key_error: float
    value_error: float
    error: float | None
    measured: dict[str, float]

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "latents", "read too", "keys, not rebuilt", "values, not rebuilt"

    def cells(self) -> tuple:
        return " + ".join(map(str, self.ranks)), self.shared_rank, short(self.key_error), short(self.value_error)
