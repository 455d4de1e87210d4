"""Abstract base class of a conversion target. The converter calls its methods in the order of their definition.

Each target is a subclass of :class:`Structure` in a separate folder; an instance is one conversion.
:mod:`surgery.structures.converter` runs the steps, :mod:`surgery.structures.registry` maps names to targets.
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
from surgery.verification.written import Verification, verify_by_running

ConfigOf = Callable[[PreTrainedConfig, int, int], PreTrainedConfig]
"""Function from the source's config, the latent rank and the rotary dimensions to the config of a result."""

ROTARY = ".rotary_emb.inv_freq"
LONG = 2**20
"""Context length at which windows, sinks and other fixed-size parts are negligible in the KV bytes per token."""


@dataclass(frozen=True)
class Outcome:
    """Result of a conversion after the new tensors of every layer are written.

    Attributes:
        target: entry of the report on the target; the report adds "called" and "engines".
        layers: one dataclass per layer for the report, with the errors of each stage as ``measured``, and ``columns()``
            and ``cells()`` for printed tables.
        simulated: final hidden states [N, T, D] of the last stage on the held-out text.
        factors: multipliers of copied tensors, by tensor name.
        splits: tried splits of the budget with their held-out losses.
        shape: shape of the source if it is not a checkpoint of a family.
    """

    config: dict[str, Any]
    target: dict[str, Any]
    layers: list[Any]
    scores: dict[str, Score]
    simulated: Tensor
    factors: Mapping[str, float] = field(default_factory=dict)
    custom_class: bool = False
    splits: list[dict[str, Any]] = field(default_factory=list)
    shape: SourceShape | None = None


@dataclass(frozen=True)
class Forecast:
    """Forecast of a conversion, made before any computation.

    Attributes:
        config: config.json of the result, with a likely value for each part that calibration decides.
        kv_bytes_per_token: upper bound, in the dtype of the weights.
        settled: whether engine support is known before the conversion.
        engines: table of engines if it cannot be derived from ``config`` yet.
    """

    config: dict[str, Any]
    tensors: Mapping[str, TensorSpec]
    kv_bytes_per_token: float
    model_type: str
    reasons: list[str]
    demand: Demand
    settled: bool = True
    engines: dict[str, dict] | None = None

    def engines_of(self, reader: CheckpointReader, config: dict[str, Any]) -> dict[str, dict]:
        """Return the table of engines for a result with this config.json."""
        if self.engines is None or reader.stored_names:
            return engine_table(whole_config(reader, config), folder=reader.path)
        return self.engines


@dataclass(frozen=True)
class TargetOption:
    """Options of a target that `surgery inspect` lists before any calibration.

    Attributes:
        flags: flags after ``--to NAME``, with a leading space, which set ``settings``.
        option_rank: rank among the options of all targets by the loss increase; None: after all ranked options.
        caution: warning because of which the option is not recommended.
        listed: whether the option is in the table; an unlisted option is the smallest that may be recommended.
        optional: whether to omit the option for sources to which it does not apply.
    """

    flags: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    option_rank: int | None = None
    caution: str = ""
    listed: bool = True
    optional: bool = False


@dataclass(frozen=True)
class Candidate:
    """Settings that `surgery plan` compares; ``scales``: whether ``kv_ratio`` sets the size of the result."""

    settings: Mapping[str, Any]
    scales: bool = True


class Structure(ABC, Generic[Opened, Settings]):
    """Abstract base class of a conversion target. An instance is one conversion.

    The constructor raises SurgeryError for everything that can be checked before any computation.

    Attributes:
        keeps_class: whether results have the source's class, which may include a vision tower.
        supports_multimodal: whether custom-class results may be the language model of a vision-language model.
        takes_latents: whether sources may be MLA already.
        options: options that `surgery inspect` lists before any calibration.
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
        """Return the class that converts a source of this config.json, such as a subclass for MLA sources."""
        return cls

    @classmethod
    def open(cls, reader: CheckpointReader, settings: Settings) -> Opened:
        """Open a source checkpoint; by default one of a supported family.

        Raises SurgeryError: it cannot be read or converted.
        """
        return Source.of(reader, settings)

    @classmethod
    def over(cls, opened: Opened, settings: Settings, progress: Progress) -> Structure:
        """Create the structure for an opened source; a subclass may return a different structure."""
        return cls(opened, settings, progress)

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return the settings that `surgery plan` compares for a source of this config.json; none by default.

        A structure with candidates implements :meth:`closed_form`, or :meth:`pass_group` if it groups layers.
        """
        return []

    @classmethod
    def bench_configs(cls) -> Mapping[str, ConfigOf]:
        """Return the configs that `surgery bench decode` runs with random weights, by suffix of the target's name."""
        return {}

    @abstractmethod
    def forecast(self) -> Forecast:
        """Forecast the target class, the KV bytes and the cost; after :meth:`plan` with the planned budget."""

    @property
    def lag_basis(self) -> BasisOf | None:
        """Function that computes the key basis of the lag statistics; None if the structure needs none."""
        return None

    @property
    def first_tokens(self) -> int:
        """Number of tokens at the start of each sequence that the statistics leave out."""
        return 0

    def closed_form(self, work: ConversionContext, layer: int) -> nn.Module:
        """Return a surrogate module that simulates a layer's converted attention on prompts; needs :meth:`plan`."""
        raise NotImplementedError

    def group(self, layer: int) -> range:
        """Return the layers, including this one, that must run together, by :meth:`pass_group`."""
        return range(layer, layer + 1)

    def pass_group(self, work: ConversionContext, group: range, hidden: Tensor) -> Tensor:
        """Run hidden states [N, T, D], in place, through the converted layers of a group."""
        raise NotImplementedError

    def gather(self, work: ConversionContext) -> None:
        """Gather calibration statistics; a no-op by default."""

    @abstractmethod
    def plan(self, work: ConversionContext) -> Mapping[str, TensorSpec]:
        """Allocate the budget; return the specs of all tensors of the result, in the order of the files."""

    @abstractmethod
    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Convert and measure all layers and write their new tensors; the converter copies all other tensors."""

    def verify(self, work: ConversionContext, path: Path, outcome: Outcome) -> Verification:
        """Run the written checkpoint and compare it with the simulation.

        Raises SurgeryError: its outputs differ from the simulation, or its cache does not have the predicted bytes.
        """
        return verify_by_running(
            path,
            self.opened,
            outcome.simulated,
            work.texts.held_out,
            self.settings.batch_size,
            work.progress,
        )


def _check_multimodal(reader: CheckpointReader, supported: bool) -> None:
    kind = reader.stored_config["model_type"]
    if kind not in HOLD_CUSTOM:
        raise SurgeryError(
            f"{kind} is a vision-language model, but the class of this target is text-only. Convert --to "
            f"{_targets_with('keeps_class')}, which keeps the source's class"
        )
    if not supported:
        raise SurgeryError(
            f"{kind} is a vision-language model, which this target does not support. Convert --to "
            f"{_targets_with('supports_multimodal')}"
        )


def _targets_with(attribute: str) -> str:
    """Join the names of all targets whose structures have the attribute, for a message."""
    targets = TARGETS.working().values()
    *names, last = [each.name for each in targets if not each.fixed and getattr(each.structure(), attribute)]
    return f"{', '.join(names)} or {last}" if names else last


def unchanged_tensors(reader: CheckpointReader, config) -> dict[str, TensorSpec]:
    """Return the specs of all tensors that the model class reads from a checkpoint.

    Excludes a copy of tied embeddings, buffers of rotary frequencies, and MTP layers, which read the caches of others.
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
    """Return the specs of all output tensors: the source's, with each layer's attention replaced by ``plan(layer)``.

    ``copied`` selects the attention tensors of a layer that stay; layers in ``unchanged`` keep all.
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
