"""``surgery convert --to lowrank`` and ``--to crosslayer --method cascade``: latents in place of keys and values.

Statistics come from two sweeps over calibration text and ranks from one budget; one pass then converts every layer,
fits it and carries all stages through it.

In a cascade the layers of a group read the latents of the group's earlier layers beside their own: those are in the
cache already, and keys and values of neighbouring layers are much alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from surgery.architectures.low_rank import REASON, OwnLowRank
from surgery.architectures.own_class import MODEL_TYPE
from surgery.calibration import layer_statistics
from surgery.calibration.library import StatisticsLibrary
from surgery.calibration.statistics import LayerStatistics
from surgery.calibration.sweep import BoundaryStore
from surgery.calibration.texts import load_texts
from surgery.checkpoint import CheckpointWriter
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.running.layer_stream import StreamedLayer
from surgery.running.source import Source
from surgery.structures.alternatives import Alternatives, least_loss
from surgery.structures.converter import Conversion, Outcome, finish, open_request, planned_tensors, replaced_names
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.ladder import Ladder
from surgery.structures.low_rank.rank_plan import plan_bits, plan_ranks, wanted_rank
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.sequential_fit import SequentialFit, Solve
from surgery.transforms.attention_fit import gram
from surgery.transforms.low_rank import SharedMoments, loss_metric, low_rank_layer
from surgery.transforms.low_rank_fit import fit_low_rank_layer, order_latents
from surgery.transforms.low_rank_layer import Block, LowRankLayer, SimulatedLowRank

CLOSED, FITTED = "low rank", "fitted"
EXACT_WINDOW = {CLOSED: "exact window", FITTED: "fitted, exact window"}
"""Stages of a conversion in the ladder of the report, after the source: the forms, and each beside an exact window."""


@dataclass(frozen=True)
class LowRankLayerReport:
    """One layer of the report.

    Attributes:
        ranks: of its blocks of latents.
        shared_rank: latents of earlier layers that it reads.
        key_error, value_error, error: predicted, before the fit; see
            :class:`surgery.transforms.low_rank.LowRankConversion`.
        energies: of its latents in the metric of the loss, best first, block after block: what slicing goes by.
        measured: relative error of the layer's own output on the source's inputs, at each stage.
    """

    layer: int
    ranks: tuple[int, ...]
    shared_rank: int
    key_error: float
    value_error: float
    error: float
    energies: list[float]
    measured: dict[str, float]


@dataclass
class _Group:
    """What the earlier layers of a group hand on to the next."""

    stages: dict[str, list[SimulatedLowRank]] = field(default_factory=dict)
    fit: list[SimulatedLowRank] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)  # [N, T, r] each, of the source's inputs


def convert_to_low_rank(
    source: str | Path,
    out: str | Path | None = None,
    settings: LowRankSettings | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Conversion:
    """Converts a checkpoint's keys and values to low rank and writes the result as a Hugging Face checkpoint.

    Args:
        source: local folder or hub id.
        out: folder to write; the source's name with "-lowrank" or "-crosslayer" behind it by default.
        settings: default :class:`LowRankSettings`; :class:`CrossLayerSettings` of method "cascade" ask for one.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        command: what the user typed, for the report.
        progress: bars; silent if None.

    Raises:
        SurgeryError: bad input or an impossible request; nothing is left behind.
    """
    settings, progress = settings or LowRankSettings(), progress or Progress(silent=True)
    cascade = isinstance(settings, CrossLayerSettings)
    target = "crosslayer" if cascade else "lowrank"
    opened, out = open_request(source, out, target, settings, overwrite=overwrite, allow_pickle=allow_pickle)
    first = opened.anatomy(0)
    wanted_rank(settings, first)
    earlier = _earlier_layers(opened, settings.group_size if cascade else 1)
    _check_windows(opened, settings)
    texts = load_texts(opened, settings, progress)
    if cascade and texts.calibration is None:
        raise SurgeryError("--to crosslayer: what layers have in common shows in text only: drop --calibration none")
    with StatisticsLibrary() as library, BoundaryStore() as store, Alternatives() as alternatives:
        layer_statistics.gather(opened, library, texts.calibration, store, settings, progress, gradients=True)
        planned = _one_layer_settings(settings) if cascade else settings
        if settings.bits == "auto":
            blocks, codes = plan_bits(opened, library, texts.held_out, planned)
        else:
            blocks, codes = plan_ranks(opened, library, texts.held_out, planned, progress), None
        # Without a window sinks are of the codes.
        sinks = settings.sinks if settings.window else 0
        writes = OwnLowRank(first, blocks, earlier, sinks, settings.window, codes)
        replaced = replaced_names(opened, writes.copied)
        tensors = planned_tensors(opened, replaced, writes.plan)
        with CheckpointWriter(out, tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite) as writer:
            fit = None
            if planned.method == "fisher" and texts.calibration is not None and settings.fit_steps:
                fit = SequentialFit(opened.stream, store, texts.calibration, settings.batch_size)
            # In a fitted cascade the closed form of a layer stands on fitted latents, and is no stage by itself.
            forms = (*(() if cascade and fit else (CLOSED,)), *((FITTED,) if fit else ()))
            windowed = tuple(EXACT_WINDOW[form] for form in forms) if settings.window else ()
            ladder = Ladder(
                opened.stream,
                texts.held_out,
                settings.batch_size,
                (*forms, *windowed),
                steps=forms if windowed else (),
            )
            passing = _Pass(opened, library, store, fit, ladder, planned)
            reports: dict[str, list[LowRankLayerReport]] = {}
            with progress.phase("convert", opened.layers) as advance:
                for index in range(opened.layers):
                    converted = passing.convert(index, blocks[index], _group_of(index, earlier))
                    for form, (layer, report) in converted.items():
                        alternatives.save(form, index, writes.tensors(index, layer.to("cpu", torch.float64)))
                        reports.setdefault(form, []).append(report)
                    advance()
            scores = ladder.scores()
            result = least_loss(windowed or forms, scores)
            form = forms[(windowed or forms).index(result)]
            alternatives.write(form, opened.layers, writer)
            outcome = Outcome(
                config=writes.config(opened.reader.config),
                replaced=replaced,
                target={
                    "to": target,
                    "method": settings.method,
                    "model_type": MODEL_TYPE,
                    "reasons": [REASON],
                    "ranks": [writes.rank(layer) for layer in range(opened.layers)],
                    "shared_layers": list(earlier),
                    "sinks": sinks,
                    "window": settings.window,
                    "result": result,
                    **({"codes": codes} if codes else {}),
                },
                kv_bytes=writes.kv_bytes,
                groups=sorted({_group_of(index, earlier) for index in range(opened.layers)}),
                layers=reports[form],
                scores=scores,
                simulated=ladder.hidden[result],
                own_class=True,
            )
            report = finish(writer, tensors, opened, settings, texts, outcome, command, progress)
    return Conversion(writer.out, report)


class _Pass:
    """The one pass over all layers: converts, fits and measures one after the other."""

    def __init__(
        self,
        opened: Source,
        library: StatisticsLibrary,
        store: BoundaryStore,
        fit: SequentialFit | None,
        ladder: Ladder,
        settings: LowRankSettings,
    ):
        self._opened, self._library, self._store = opened, library, store
        self._fit, self._ladder, self._settings = fit, ladder, settings
        self._group = _Group()

    def convert(
        self, index: int, blocks: tuple[Block, ...], group: tuple[int, int]
    ) -> dict[str, tuple[LowRankLayer, LowRankLayerReport]]:
        """Converts one layer, by form; ``group`` are the first of the layers that share latents, and the one after the
        last.
        """
        stream, (start, stop) = self._opened.stream, group
        if index == start:
            self._group = _Group()
        anatomy, statistics = self._opened.anatomy(index).to(torch.float64), self._library.load(index)[0]
        with stream.layer(index) as layer:
            inputs, shared = None, None
            if stop - start > 1:
                inputs = self._source_inputs(layer, index)
            if index > start:
                latents = torch.cat(self._group.latents, dim=-1)
                live = anatomy.to(stream.device, stream.dtype)
                shared = SharedMoments.of(live, inputs, latents, statistics.token_weight)
            converted = low_rank_layer(anatomy, statistics, blocks, self._settings.method, shared)
            closed = converted.layer
            energies = torch.cat([e[: b.rank] for e, b in zip(converted.energies, blocks, strict=True)])
            # What a method keeps in any case (ThinK's values) counts as its best: JSON knows no infinity.
            energies = energies.clamp_max(energies[energies.isfinite()].max())
            forms = {CLOSED: (closed, energies)} if CLOSED in self._ladder.hidden else {}
            if self._fit:
                fitted = self._fit.fit(index, layer, anatomy, self._solver(index, closed, statistics))
                self._group.fit.append(fitted)
                forms[FITTED] = fitted.layer, self._energies
            stages = {name: form for name, (form, _) in forms.items()}
            if self._settings.window:
                stages |= {EXACT_WINDOW[name]: form for name, (form, _) in forms.items()}
            errors = self._measure(layer, anatomy, stages)
            if index + 1 < stop:
                last, _ = list(forms.values())[-1]
                self._group.latents.append(last.to(stream.device, stream.dtype).latents(inputs))
        ranks = tuple(block.rank for block in blocks)
        predicted = converted.key_error, converted.value_error, converted.error
        return {
            name: (form, LowRankLayerReport(index, ranks, form.shared, *predicted, worth.tolist(), errors))
            for name, (form, worth) in forms.items()
        }

    def _measure(
        self, layer: StreamedLayer, anatomy: AttentionAnatomy, forms: dict[str, LowRankLayer]
    ) -> dict[str, float]:
        """Carries all stages through the layer; the relative error of each."""
        stream, modules = self._opened.stream, {}
        for name, form in forms.items():
            earlier = self._group.stages.setdefault(name, [])
            window = {}
            if name in EXACT_WINDOW.values():
                window = {"sinks": self._settings.sinks, "window": self._settings.window}
            modules[name] = SimulatedLowRank(form.to(stream.device, stream.dtype), tuple(earlier), **window)
            earlier.append(modules[name])
        makers = {name: lambda module=module: module for name, module in modules.items()}
        return self._ladder.advance(layer, anatomy, makers, forms)

    def _solver(self, index: int, start: LowRankLayer, statistics: LayerStatistics) -> Solve:
        """The least-squares problem of one layer, from its closed form; orders the latents that it finds."""
        stream, settings = self._opened.stream, self._settings
        earlier = tuple(self._group.fit)

        def solve(inputs: Tensor, targets: Tensor) -> SimulatedLowRank:
            shared = torch.cat([torch.cat(other.latents) for other in earlier], dim=-1) if earlier else None
            fitted, _, _ = fit_low_rank_layer(
                start.to(stream.device, stream.dtype),
                inputs,
                targets,
                statistics.output_metric.to(stream.device),
                shared=shared,
                steps=settings.fit_steps,
                iterations=settings.fit_iterations,
                queries=settings.fit_queries,
                seed=settings.seed + index,
            )
            moment = sum(gram(fitted.latents(x.to(fitted.down))).cpu() for x in inputs) / inputs.shape[:2].numel()
            fitted = fitted.to("cpu", torch.float64)
            ordered, self._energies = order_latents(fitted, moment, loss_metric(fitted.source, statistics))
            return SimulatedLowRank(ordered.to(stream.device, stream.dtype), earlier)

        return solve

    @torch.no_grad()
    def _source_inputs(self, layer: StreamedLayer, index: int) -> Tensor:
        """What enters the attention in the source model, [N, T, D]."""
        stream, hidden = self._opened.stream, self._store.load(index)
        rows = hidden.split(self._settings.batch_size)
        return torch.cat([layer.attention_inputs(part.to(stream.device, stream.dtype)) for part in rows])


def _one_layer_settings(settings: CrossLayerSettings) -> LowRankSettings:
    """What a cascade asks of every layer."""
    names = {field.name for field in fields(LowRankSettings)}
    given = {name: value for name, value in settings.to_dict().items() if name in names}
    return LowRankSettings(**{**given, "method": "fisher"})


def _earlier_layers(opened: Source, group_size: int) -> tuple[int, ...]:
    """How many layers of its group stand before each layer; groups do not span layers of different windows."""
    earlier = []
    for layer in range(opened.layers):
        same = layer > 0 and _window(opened, layer) == _window(opened, layer - 1)
        place = earlier[-1] + 1 if same and earlier[-1] + 1 < group_size else 0
        earlier.append(place)
    return tuple(earlier)


def _group_of(layer: int, earlier: tuple[int, ...]) -> tuple[int, int]:
    """First layer of a layer's group, and the one after its last."""
    start = stop = layer - earlier[layer]
    while stop < len(earlier) and stop - earlier[stop] == start:
        stop += 1
    return start, stop


def _window(opened: Source, layer: int) -> int | None:
    return opened.family.window(opened.config, layer)


def _check_windows(opened: Source, settings: LowRankSettings) -> None:
    """Raises SurgeryError where an exact window would stand beside a layer that forgets."""
    if settings.window and any(_window(opened, layer) is not None for layer in range(opened.layers)):
        raise SurgeryError("--window: layers with a sliding window of their own forget already: leave it out")
