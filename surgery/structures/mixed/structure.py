"""Layers that become different things: each as one of the other structures makes it, in one pass over the layers.

Every part is a conversion of the whole model whose budget is spent as if it were alone; of what it makes, the layers
that it is given are taken. So what was measured of the parts alone, layer by layer, is what their layers are here. The
fit goes through all layers: one part's layers make up for what another's have lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch

from surgery.architectures.own_class import MODEL_TYPE, layer_entries, own_config
from surgery.calibration.held_out import HeldOut
from surgery.calibration.layer_statistics import BasisOf
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.families.base import ATTENTION_PREFIX
from surgery.running.skeleton import skeleton
from surgery.running.source import Source
from surgery.structures.alternatives import least_loss
from surgery.structures.base import LONG, Foreseen, Outcome, Structure, replanned_tensors
from surgery.structures.estimates import Demand
from surgery.structures.kv_bytes import source_kv_bytes
from surgery.structures.mixed.settings import MixedSettings
from surgery.structures.passing import pass_kept
from surgery.structures.registry import target_of
from surgery.structures.sequential_fit import SequentialFit
from surgery.structures.stages import StageRuns
from surgery.structures.work import Work
from surgery.verification.flow import predicted_flow

T = TypeVar("T")
REASON = "no stock class has layers of different kinds"
CLOSED, FITTED = "closed form", "fitted"
"""Stages of the report after the source."""


@dataclass(frozen=True)
class MixedLayerReport:
    """One layer of the report.

    Attributes:
        to: what it becomes; "kept" where it stays.
        measured: relative error of the layer's own output on the source's inputs, at each stage.
    """

    layer: int
    to: str = "kept"
    asked: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def columns() -> tuple[str, ...]:
        """Heads of :meth:`cells`."""
        return ("becomes",)

    def cells(self) -> tuple:
        """For people."""
        return (" ".join([self.to, *(f"{name} {value}" for name, value in self.asked.items())]),)


class Mixed(Structure[Source, MixedSettings]):
    """A structure for every layer, or its own attention."""

    beside_pictures = True

    def __init__(self, opened: Source, settings: MixedSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        if not settings.parts:
            raise SurgeryError("mixed: no parts say which layers become what: surgery plan writes them, see --plan")
        if settings.layers != opened.layers:
            raise SurgeryError(
                f"parts: parts and keep name {settings.layers} layers, and this model has {opened.layers}"
            )
        asked = [part.settings for part in settings.parts]
        self._structures = [target_of(each).structure()(opened, each, progress) for each in asked]
        for part, structure in zip(settings.parts, self._structures, strict=True):
            if not any(each.mixes for each in structure.candidates(opened.reader.config)):
                raise SurgeryError(f"parts: {part.to} makes layers that do not stand alone: convert all --to {part.to}")
            config = structure.foresee().config
            if config["model_type"] != MODEL_TYPE and not part.settings.quantizes:
                raise SurgeryError(f"parts: {part.to} makes a {config['model_type']}, whose layers cannot differ so")
        self._part_of = {layer: number for number, part in enumerate(settings.parts) for layer in part.layers}
        if wrong := sorted(opened.fixed & self._part_of.keys()):
            raise SurgeryError(f"parts: layer {wrong[0]} keeps a state in place of keys and values: name it in keep")

    @property
    def lag_basis(self) -> BasisOf | None:
        """The first that a part asks for."""
        return next((basis for structure in self._structures if (basis := structure.lag_basis)), None)

    def foresee(self) -> Foreseen:
        """What the parts foresee of their layers."""
        opened, foreseen = self.opened, [structure.foresee() for structure in self._structures]
        config = own_config(opened.reader.config, self._of_layers([layer_entries(each.config) for each in foreseen]))
        sized, demands = all(each.sized for each in foreseen), [each.demand for each in foreseen]
        if sized:
            tokens = self.settings.context or LONG
            held = skeleton(self._with_bits(config), opened.weight_dtype).kv_cache_bytes(1, tokens) / tokens
        else:
            of_part = [each.kv_bytes_per_token / opened.layers for each in foreseen]
            held = sum(
                self._of_layers([[each] * opened.layers for each in of_part], source_kv_bytes(opened) / opened.layers)
            )
        return Foreseen(
            config=config,
            tensors=self._tensors([each.tensors for each in foreseen]),
            kv_bytes_per_token=held,
            model_type=MODEL_TYPE,
            reasons=[REASON],
            demand=Demand(**{each.name: max(getattr(one, each.name) for one in demands) for each in fields(Demand)}),
            sized=sized,
        )

    def gather(self, work: Work) -> None:
        """Moments, the loss gradient's, and what attention over lags a part needs, if any part needs any."""
        if any(structure.foresee().demand.statistics for structure in self._structures):
            work.gather(basis_of=self.lag_basis)

    def plan(self, work: Work) -> Mapping[str, TensorSpec]:
        """Has every part spend its budget, without text to try anything on: as a plan that measured it did."""
        for structure in self._structures:
            structure.plan(_of_part(work, structure))
        return self.foresee().tensors

    def convert_layers(self, work: Work, writer: CheckpointWriter) -> Outcome:
        """The closed forms and the fitted ones, of which those of less held-out loss are written."""
        opened, settings = self.opened, self.settings
        fits = work.fits(any(structure.foresee().demand.fit_steps for structure in self._structures))
        runs = work.stage_runs((CLOSED, FITTED)[: 1 + fits], steps=() if fits else (CLOSED,))
        fit = work.fit(runs, CLOSED, FITTED)
        reports = work.pass_layers(
            lambda index, fit: self._convert(index, work, fit, runs), runs, fit, MixedLayerReport
        )
        scores = runs.scores()
        result = least_loss((CLOSED, FITTED), scores)
        work.alternatives.write(result, opened.layers, writer)
        config = self.foresee().config
        whole = skeleton(config, opened.weight_dtype)
        return Outcome(
            config=config,
            target={
                "to": "mixed",
                "method": "by layer",
                "model_type": MODEL_TYPE,
                "reasons": [REASON],
                "parts": [part.to_dict() for part in settings.parts],
                "kept_layers": list(settings.keep),
                "result": result,
                **({"fit": fit.facts()} if fit else {}),
            },
            kv_bytes=lambda tokens: whole.kv_cache_bytes(1, tokens),
            layers=reports,
            scores=scores,
            simulated=runs.hidden[result],
            own_class=True,
            flow=partial(predicted_flow, skeleton(config, opened.stream.dtype)),
        )

    def _convert(self, index: int, work: Work, fit: SequentialFit | None, runs: StageRuns) -> MixedLayerReport:
        """Converts, fits and measures one layer."""
        if index not in self._part_of:
            pass_kept(self.opened, index, fit, runs, work.alternatives)
            return MixedLayerReport(index)
        structure = self._structures[self._part_of[index]]
        part = self.settings.parts[self._part_of[index]]
        anatomy = self.opened.anatomy(index).to(torch.float64)
        stages = [stage for stage in runs.hidden if stage != "source"]
        with self.opened.stream.layer(index) as layer:
            forms = structure.layer_forms(_of_part(work, structure), index, layer, anatomy, fit)
            if fit and len(forms) == 1:
                fit.go_past(layer, forms[0].attention)
            by_stage = {stage: forms[min(place, len(forms) - 1)] for place, stage in enumerate(stages)}
            makers = {stage: lambda form=form: form.attention for stage, form in by_stage.items()}
            errors = runs.advance(layer, anatomy, makers, stages)
        for stage, form in by_stage.items():
            work.alternatives.save(stage, index, form.tensors)
        return MixedLayerReport(index, part.to, dict(part.asked), errors)

    def _of_layers(self, by_part: Sequence[Sequence[T]], kept: T | None = None) -> list[T | None]:
        """Of every layer what its part has for it, of what parts have for all layers; ``kept`` of those that stay."""
        return [
            by_part[self._part_of[layer]][layer] if layer in self._part_of else kept
            for layer in range(self.opened.layers)
        ]

    def _tensors(self, by_part: Sequence[Mapping[str, TensorSpec]]) -> dict[str, TensorSpec]:
        """Every tensor of the result, of what parts would write."""

        def attention(layer: int) -> dict[str, TensorSpec]:
            prefix = ATTENTION_PREFIX.format(layer=layer)
            return {name: spec for name, spec in by_part[self._part_of[layer]].items() if name.startswith(prefix)}

        kept = [layer for layer in range(self.opened.layers) if layer not in self._part_of]
        return replanned_tensors(self.opened, lambda names: (), attention, kept)

    def _with_bits(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "kv_cache": self.settings.kv_cache()} if self.settings.quantizes else config


def _of_part(work: Work, structure: Structure) -> Work:
    """What a part has in hand: no held-out text, so that it tries nothing."""
    held_out = work.texts.held_out
    untried = HeldOut(held_out.tokens, 0, held_out.answers[:0])
    return replace(work, settings=structure.settings, texts=replace(work.texts, held_out=untried))
