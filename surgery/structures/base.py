"""Abstract base class of a conversion target. The converter calls its methods in the order in which they stand here.

A structure is a subclass of :class:`Structure` in a folder of its own; one object of it is one conversion.
:mod:`surgery.structures.converter` owns the order of events, :mod:`surgery.structures.registry` knows the names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic

from torch import Tensor, nn
from transformers import PreTrainedConfig

from surgery.architectures.multimodal import whole_config
from surgery.calibration.held_out import Score
from surgery.calibration.layer_statistics import BasisOf
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.engines.table import engine_table
from surgery.families.base import is_mtp_layer
from surgery.families.multimodal import HOLD_CUSTOM
from surgery.reporting.report import SourceShape
from surgery.running.source import Source
from surgery.structures.context import ConversionContext, Opened, Settings
from surgery.structures.estimates import Demand
from surgery.structures.registry import TARGETS
from surgery.verification.flow import Flow
from surgery.verification.written import Verification, verify_by_running

ConfigOf = Callable[[PreTrainedConfig, int, int], PreTrainedConfig]
"""The config of a result, from the source's, the numbers of a latent and the rotated ones."""

ROTARY = ".rotary_emb.inv_freq"
LONG = 2**20
"""Tokens at which what is kept of a few tokens no longer counts in the bytes of one."""


@dataclass(frozen=True)
class Outcome:
    """Result of a conversion once every layer's new tensors are written.

    Attributes:
        config: the config.json of the result.
        target: what it became, for the report; "called" and "engines" are added there.
        layers: a dataclass a layer for the report, with the errors of each stage as ``measured``, and ``columns()`` and
            ``cells()`` for people.
        scores: loss and recall after each stage.
        simulated: final hidden states [N, T, D] of the last stage on the held-out text.
        factors: by which copied tensors are multiplied.
        own_class: whether the model class's files have to travel with it.
        final_config: config.json of another class for the same tensors, written once the result is verified as
            ``config`` says; ``final_code``: files that it needs next to the weights.
        splits: of the budget that were tried, with their held-out losses.
        shape: of the source, where it is no checkpoint of a family.
        flow: predicted peak and footprint of a prompt and decoded tokens, in the dtype in which layers run.
    """

    config: dict[str, Any]
    target: dict[str, Any]
    layers: list[Any]
    scores: dict[str, Score]
    simulated: Tensor
    factors: Mapping[str, float] = field(default_factory=dict)
    own_class: bool = False
    final_config: dict[str, Any] | None = None
    final_code: tuple[Path, ...] = ()
    splits: list[dict[str, Any]] = field(default_factory=list)
    shape: SourceShape | None = None
    flow: Callable[[int, int], Flow] | None = None


@dataclass(frozen=True)
class Forecast:
    """Forecast of a conversion, made before any work.

    Attributes:
        config: config.json of the result, with an exact cache; where work decides a part, that part as it is likely.
        tensors: every tensor of the result.
        kv_bytes_per_token: at most, in the bytes of the weights.
        model_type, reasons: of the class that carries it.
        demand: what it computes.
        splits: of the budget that would be tried.
        settled: whether nothing that engines look at is left to the work; ``engines`` what they say where it is not.
    """

    config: dict[str, Any]
    tensors: Mapping[str, TensorSpec]
    kv_bytes_per_token: float
    model_type: str
    reasons: list[str]
    demand: Demand
    splits: list[dict[str, Any]] = field(default_factory=list)
    settled: bool = True
    engines: dict[str, dict] | None = None

    def engines_of(self, reader: CheckpointReader, config: dict[str, Any]) -> dict[str, dict]:
        """Return the table of engines for the result of a source, whose config.json is ``config``."""
        if self.engines is None or reader.stored_names:
            return engine_table(whole_config(reader, config))
        return self.engines


@dataclass(frozen=True)
class TargetOption:
    """Options of a target that `surgery inspect` lists before any calibration.

    Attributes:
        flags: after ``--to NAME``, with a space before them; ``settings`` says the same.
        place: rank among the options of all targets by the loss increase; None: after those that have one.
        caution: what is to be known first, for which it is not advised.
        listed: whether it stands in the table; else it is the smallest that may be advised.
        optional: nothing is said of it where it does not apply.
    """

    flags: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    place: int | None = None
    caution: str = ""
    listed: bool = True
    optional: bool = False


@dataclass(frozen=True)
class Candidate:
    """Settings that are worth weighing where a budget is all that is asked for.

    Attributes:
        settings: by name.
        scales: whether a ``kv_ratio`` next to them says how small the result is.
    """

    settings: Mapping[str, Any]
    scales: bool = True


class Structure(ABC, Generic[Opened, Settings]):
    """One conversion to a structure.

    Making one refuses what can be refused before any work (SurgeryError).

    Attributes:
        keeps_class: whether results are of the source's class, which may hold other models next to the language model.
        supports_multimodal: whether results of the custom model class may be the language model of a vision-language
            model.
        takes_latents: whether sources may be MLA already.
        options: what is shown of it before text was read.
    """

    keeps_class: ClassVar[bool] = False
    supports_multimodal: ClassVar[bool] = False
    takes_latents: ClassVar[bool] = False
    options: ClassVar[tuple[TargetOption, ...]] = (TargetOption(),)

    def __init__(self, opened: Opened, settings: Settings, progress: Progress):
        if opened.reader.stored_names and not self.keeps_class:
            _check_multimodal(opened.reader, self.supports_multimodal)
        self.opened, self.settings = opened, settings

    @classmethod
    def for_source(cls, config: Mapping[str, Any], settings: Settings) -> type[Structure]:
        """The class that converts a source of this config.json: another one where the way there is another."""
        return cls

    @classmethod
    def open(cls, reader: CheckpointReader, settings: Settings) -> Opened:
        """Opens what can be converted: a checkpoint of a family.

        Raises:
            SurgeryError: it cannot be read or converted.
        """
        return Source.of(reader, settings)

    @classmethod
    def over(cls, opened: Opened, settings: Settings, progress: Progress) -> Structure:
        """Return a structure of this class over an opened source, or another one that takes its place there."""
        return cls(opened, settings, progress)

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return the settings of this structure that `surgery plan` weighs for a source of this config.json; none by
        default.

        A structure that names some has :meth:`closed_form`, or :meth:`pass_group` of layers that it groups.
        """
        return []

    @classmethod
    def bench_configs(cls) -> Mapping[str, ConfigOf]:
        """Return the configs that `surgery bench decode` fills at random, by suffix of the target's name; none by
        default."""
        return {}

    @abstractmethod
    def forecast(self) -> Forecast:
        """Forecast the class that will carry the result, its bytes and the cost of the work.

        Once the budget is spent (:meth:`plan`), with what that settled.
        """

    @property
    def lag_basis(self) -> BasisOf | None:
        """The key basis whose attention over lags it wants among its statistics."""
        return None

    @property
    def first_tokens(self) -> int:
        """Tokens at the start of each sequence that its statistics leave out."""
        return 0

    def closed_form(self, work: ConversionContext, layer: int) -> nn.Module:
        """Surrogate module of a layer's attention, as it becomes, for prompts only; after :meth:`plan`."""
        raise NotImplementedError

    def group(self, layer: int) -> range:
        """The layers that can only be run together with this one, and it: of those :meth:`pass_group` stands in."""
        return range(layer, layer + 1)

    def pass_group(self, work: ConversionContext, group: range, hidden: Tensor) -> Tensor:
        """Carries [N, T, D], in place, through layers that can only be run together, as they become."""
        raise NotImplementedError

    def gather(self, work: ConversionContext) -> None:
        """Takes statistics; a structure that needs none leaves it."""

    @abstractmethod
    def plan(self, work: ConversionContext) -> Mapping[str, TensorSpec]:
        """Spends the budget; every tensor of the result, in the order of the files."""

    @abstractmethod
    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Passes over all layers: converts, measures and writes what is new. What it does not write is copied."""

    def verify(self, work: ConversionContext, path: Path, outcome: Outcome) -> Verification:
        """Runs what was written, with a config and all tensors, against what was simulated.

        Raises:
            SurgeryError: it computes something else, or its cache has other bytes than predicted.
        """
        return verify_by_running(
            path,
            self.opened,
            outcome.simulated,
            work.texts.held_out,
            self.settings.batch_size,
            work.progress,
            flow=outcome.flow,
        )


def _check_multimodal(reader: CheckpointReader, can: bool) -> None:
    kind = reader.stored_config["model_type"]
    if kind not in HOLD_CUSTOM:
        raise SurgeryError(
            f"{kind} is a vision-language model, and this target's class holds a language model alone. Convert --to "
            f"{_targets_that('keeps_class')}, which keeps the source's class"
        )
    if not can:
        raise SurgeryError(
            f"{kind} is a vision-language model, which this target cannot write. Convert --to "
            f"{_targets_that('supports_multimodal')}"
        )


def _targets_that(attribute: str) -> str:
    """Names of targets whose structures say so, for people."""
    targets = TARGETS.working().values()
    *names, last = [each.name for each in targets if not each.fixed and getattr(each.structure(), attribute)]
    return f"{', '.join(names)} or {last}" if names else last


def unchanged_tensors(reader: CheckpointReader, config) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint that its class reads.

    Not in it are a copy of tied embeddings, the buffers of rotary frequencies that old checkpoints hold, and MTP layers
    after the model's, which read what other layers cache.
    """
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {
        name: TensorSpec(reader.info(name).dtype, reader.info(name).shape)
        for name in reader.names()
        if name not in tied and not name.endswith(ROTARY) and not is_mtp_layer(name, config.num_hidden_layers)
    }


def replanned_tensors(
    opened: Source,
    copied: Callable[[list[str]], Collection[str]],
    plan: Callable[[int], Mapping[str, TensorSpec]],
    unchanged: Collection[int] = (),
) -> dict[str, TensorSpec]:
    """Every tensor of the output in the source's order, a layer's new attention ``plan(layer)`` where the old began.

    Args:
        copied: which of a layer's attention tensors stay unchanged.
        unchanged: layers of which all do.
    """
    tensors = unchanged_tensors(opened.reader, opened.config)
    layer_of = {}
    for layer in range(opened.layers):
        names = opened.family.attention_names(opened.reader, layer)
        if layer not in unchanged:
            layer_of |= dict.fromkeys(set(names) - set(copied(names)), layer)
    planned: dict[str, TensorSpec] = {}
    for name, spec in tensors.items():
        planned |= plan(layer_of[name]) if name in layer_of else {name: spec}
    return planned
