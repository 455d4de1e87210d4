"""``surgery convert --to mla``: read, calibrate, transform, write, verify; one layer at a time.

The order of events: the source is opened and checked, statistics are taken (two sweeps over calibration text, or the
weights alone), candidate splits of the budget are tried on held-out text, then one pass converts every layer, carries
all stages of the conversion through it and writes its tensors. The written files are loaded again, run and compared
before they get their final name.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from surgery.architectures.choose import Carrier
from surgery.calibration import layer_statistics
from surgery.calibration.held_out import HeldOut
from surgery.calibration.library import StatisticsLibrary
from surgery.calibration.sweep import BoundaryStore
from surgery.calibration.texts import Texts, load_texts
from surgery.checkpoint import CheckpointWriter
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.running.layer_stream import LayerStream
from surgery.running.source import Source
from surgery.structures.alternatives import Alternatives, least_loss
from surgery.structures.converter import Conversion, Outcome, finish, open_request, planned_tensors, replaced_names
from surgery.structures.ladder import Form, Ladder
from surgery.structures.mla import split as mla_split
from surgery.structures.mla.budget import candidate_splits
from surgery.structures.mla.forecast import forecast
from surgery.structures.mla.output import carrier_of, reserved_numbers
from surgery.structures.mla.report import EXACT_STAGES, LOSSY_STAGES, LayerReport, mla_target
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.mla.split import MLAPlan
from surgery.structures.sequential_fit import SequentialFit
from surgery.transforms import mla
from surgery.transforms.key_basis import KeyBasis, identity_basis
from surgery.transforms.latent_layer import LatentLayer, SimulatedAttention
from surgery.transforms.latent_order import order_latents
from surgery.transforms.least_squares import LatentFit
from surgery.transforms.partial_rope import latent_form


def check_request(
    source: str | Path, out: str | Path | None, settings: ConvertSettings, *, overwrite: bool, allow_pickle: bool
) -> tuple[Source, Path, list[mla.Split]]:
    """Opens the source and refuses what can be refused before any work: the output's place, the budget.

    Returns:
        The opened source, the output's folder and the splits of the budget to try.
    """
    opened, out = open_request(source, out, "mla", settings, overwrite=overwrite, allow_pickle=allow_pickle)
    first = opened.anatomy(0)
    splits = candidate_splits(settings, first, reserved_numbers(opened, settings, first))
    if settings.engine is not None:
        forecast(opened, splits[0], settings)  # refuses what the engine does not take
    return opened, out, splits


def convert_to_mla(
    source: str | Path,
    out: str | Path | None = None,
    settings: ConvertSettings | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Conversion:
    """Converts a checkpoint's attention to MLA and writes the result as a Hugging Face checkpoint.

    Args:
        source: local folder or hub id.
        out: folder to write; default as :func:`default_output`.
        settings: default :class:`ConvertSettings`.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        command: what the user typed, for the report.
        progress: bars; silent if None.

    Raises:
        SurgeryError: bad input or an impossible request; nothing is left behind.
    """
    settings, progress = settings or ConvertSettings(), progress or Progress(silent=True)
    opened, out, splits = check_request(source, out, settings, overwrite=overwrite, allow_pickle=allow_pickle)
    texts = load_texts(opened, settings, progress)
    method = mla.METHODS[settings.method]
    with StatisticsLibrary() as library, BoundaryStore() as store, Alternatives() as alternatives:
        layer_statistics.gather(
            opened,
            library,
            texts.calibration,
            store,
            settings,
            progress,
            gradients=method.gradients,
            basis_of=mla.lag_basis(method),
        )
        plan, tried, engine_cost = _choose_plan(splits, opened, library, texts.held_out, settings, progress)
        if settings.allocate == "spectrum":
            plan = plan.with_ranks_by_spectrum(opened.anatomy, library, opened.layers, progress)
        carrier = carrier_of(opened, plan, settings)
        replaced = replaced_names(opened, carrier.writer.copied)
        tensors = planned_tensors(opened, replaced, carrier.writer.plan)
        with CheckpointWriter(out, tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite) as writer:
            fit = _sequential_fit(opened, texts, store, settings)
            stages = LOSSY_STAGES[: 3 if fit else 2]
            ladder = Ladder(
                opened.stream,
                texts.held_out,
                settings.batch_size,
                (*EXACT_STAGES, *stages),
                exact=EXACT_STAGES,
                steps=stages[:1],
            )
            reports = _convert_layers(opened, plan, library, fit, carrier, ladder, alternatives, settings, progress)
            scores = ladder.scores()
            result = least_loss(stages[1:], scores)
            alternatives.write(result, opened.layers, writer)
            layers = reports[result]
            kept = [name for name in opened.reader.names() if name not in replaced]
            target = {**mla_target(carrier, plan.method.name, layers), **engine_cost, "result": result}
            width = sum(carrier.writer.kv_width(layer) for layer in range(opened.layers))
            outcome = Outcome(
                config=carrier.writer.config(opened.reader.config),
                replaced=replaced,
                target=target,
                kv_bytes=lambda tokens: width * carrier.writer.spec.dtype.itemsize * tokens,
                layers=layers,
                scores=scores,
                simulated=ladder.hidden[result],
                factors=carrier.writer.rescaled(kept) if carrier.stock else {},
                own_class=not carrier.stock,
                splits=[{**asdict(split), "held_out_loss": loss} for split, loss in tried],
            )
            report = finish(writer, tensors, opened, settings, texts, outcome, command, progress)
    return Conversion(writer.out, report)


def _choose_plan(
    splits: list[mla.Split],
    opened: Source,
    library: StatisticsLibrary,
    held_out: HeldOut,
    settings: ConvertSettings,
    progress: Progress,
) -> tuple[MLAPlan, list[tuple[mla.Split, float | None]], dict]:
    """The plan of least held-out loss, the loss of every candidate, and what an engine's limits cost, for the report.

    The free choice that an engine's is compared with is that of the same budget without limits.
    """
    method = mla.METHODS[settings.method]

    def planned(splits: list[mla.Split], frequencies: str) -> list[MLAPlan]:
        return [
            mla_split.plan_for(split, method, opened.anatomy, library, opened.layers, frequencies) for split in splits
        ]

    plans, free = planned(splits, settings.rope_frequencies), []
    if settings.engine is not None and held_out.texts:
        unlimited = replace(settings, engine=None, rope_frequencies="free")
        first = opened.anatomy(0)
        free = candidate_splits(unlimited, first, reserved_numbers(opened, unlimited, first))
    if len(plans) == 1 and not free:
        return plans[0], [(splits[0], None)], {}
    if not held_out.texts:
        # Nothing to try them on: a third for rotated numbers, the middle of what calibrated conversions choose.
        middle = min(
            range(len(splits)), key=lambda i: abs(splits[i].rope_dim - (splits[i].rope_dim + splits[i].rank) / 3)
        )
        return plans[middle], [(splits[middle], None)], {}
    losses = mla_split.try_plans(
        [*plans, *planned(free, "free")],
        opened.stream,
        opened.anatomy,
        library,
        held_out,
        settings.batch_size,
        progress,
    )
    best = min(range(len(plans)), key=losses.__getitem__)
    tried = list(zip(splits, losses[: len(plans)], strict=True))
    if not free:
        return plans[best], tried, {}
    unlimited_loss, split = min(zip(losses[len(plans) :], free, strict=True), key=lambda found: found[0])
    cost = {"engine": settings.engine, "held_out_loss": losses[best], "free_held_out_loss": unlimited_loss}
    return plans[best], tried, {"engine_limits": {**cost, "free_split": [split.rope_dim, split.rank]}}


def _sequential_fit(
    opened: Source, texts: Texts, store: BoundaryStore, settings: ConvertSettings
) -> SequentialFit | None:
    """The least-squares fit, where the method has one and there is text to fit on."""
    if texts.calibration is None or not mla.METHODS[settings.method].gradients or not settings.fit_steps:
        return None
    return SequentialFit(opened.stream, store, texts.calibration, settings.batch_size)


class _Solver:
    """The least-squares problem of one layer, from its closed form and the loss gradient's moment [D, D].

    Attributes:
        energies: of the fitted latents, which come out in their order; None until it has been solved.
    """

    def __init__(self, start: LatentLayer, metric: Tensor, index: int, stream: LayerStream, settings: ConvertSettings):
        self._start, self._metric, self._index = start, metric, index
        self._stream, self._settings = stream, settings
        self.energies: Tensor | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> SimulatedAttention:
        stream, settings = self._stream, self._settings
        problem = LatentFit(
            self._start.to(stream.device, stream.dtype),
            inputs,
            targets,
            self._metric.to(stream.device),
            queries=settings.fit_queries,
            seed=settings.seed + self._index,
        )
        fitted, _, _ = problem.run(settings.fit_steps, settings.fit_iterations)
        ordered, self.energies = order_latents(fitted.to("cpu", torch.float64), *problem.latent_moments())
        return SimulatedAttention(ordered.to(stream.device, stream.dtype))


def _convert_layers(
    opened: Source,
    plan: MLAPlan,
    library: StatisticsLibrary,
    fit: SequentialFit | None,
    carrier: Carrier,
    ladder: Ladder,
    alternatives: Alternatives,
    settings: ConvertSettings,
    progress: Progress,
) -> dict[str, list[LayerReport]]:
    """Converts and measures one layer after the other, the closed form and the fitted one; reports on both."""
    reports: dict[str, list[LayerReport]] = {}
    with progress.phase("convert", opened.layers) as advance:
        for index in range(opened.layers):
            anatomy = opened.anatomy(index).to(torch.float64)
            converted = plan.convert(anatomy, library, index)
            energies = {"truncated": converted.energy[: converted.truncated.rank]}
            stages = {"partial RoPE": converted.partial, "truncated": converted.truncated}
            with opened.stream.layer(index) as layer:
                if fit:
                    metric = library.load(index)[0].output_metric
                    solve = _Solver(converted.truncated, metric, index, opened.stream, settings)
                    stages["fitted"] = fit.fit(index, layer, anatomy, solve).layer
                    energies["fitted"] = solve.energies
                forms = _forms(anatomy, converted.basis, stages, opened.stream)
                errors = ladder.advance(layer, anatomy, forms, stages)
            for form, worth in energies.items():
                tensors = carrier.writer.tensors(index, stages[form].to("cpu", torch.float64))
                alternatives.save(form, index, tensors)
                reports.setdefault(form, []).append(LayerReport.of(index, converted, worth, errors))
            advance()
    return reports


def _forms(
    anatomy: AttentionAnatomy, basis: KeyBasis, lossy: dict[str, LatentLayer], stream: LayerStream
) -> dict[str, Form]:
    """A layer's attention in every stage of the ladder."""
    every_component = torch.arange(basis.components)
    identity = identity_basis(anatomy.kv_heads, anatomy.head_dim // 2)
    forms = {
        "merged": lambda: latent_form(anatomy, identity, every_component),
        "rotated": lambda: latent_form(anatomy, basis, every_component),
        **{name: lambda form=form: form for name, form in lossy.items()},
    }
    return {
        name: lambda form=form: SimulatedAttention(form().to(stream.device, stream.dtype))
        for name, form in forms.items()
    }
