"""Conversions to a cache of packed rows: one row of quantized values per token, bits allocated to each value.

One byte budget is allocated over the rows of all layers (:mod:`surgery.transforms.row_allocation`), in three steps:

1. Energies predict the loss of each layer to second order, and give a first allocation.
2. The real loss is several times larger, by a factor that differs between layers. It is measured for one converted
   layer at a time, and the budget is allocated again with energies scaled by these factors.
3. A layer that then gets fewer bytes may lose far more than its factor predicts. Layers are measured again, and the
   budget is allocated a last time by the larger of both factors.

Last, the output projection of every layer is refitted to the quantized values (:mod:`surgery.transforms.output_refit`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor, nn

from surgery.architectures.custom_class import MODEL_TYPE
from surgery.calibration.settings import ConversionSettings
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.human import share, short
from surgery.common.progress import Progress
from surgery.model.token_format import Runs, TokenFormat
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import StreamedLayer
from surgery.running.source import Source
from surgery.structures.base import Forecast, Outcome, Structure, replanned_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.kept_layers import converted_layers, kept_layers
from surgery.structures.passing import pass_kept, source_attention
from surgery.structures.refit import Attended, refitted_output
from surgery.structures.single_layers import single_layer_divergences
from surgery.structures.stages import Form, StageTracker
from surgery.transforms.row_allocation import Section, allocate_rows, granule_of, row_cost

QUANTIZED = "quantized"
"""Name of the lossy stage in the report."""
MEASURED_SEQUENCES = 1
"""Calibration sequences on which the loss of each layer is measured. KL divergences converge on a thousand tokens."""
ROUNDS = 2
"""Rounds of measurement and allocation. After one, a layer of SmolLM2-135M at KV ratio 0.25 had 44% output error."""
LARGEST_FACTOR = 1e4

Settings = TypeVar("Settings", bound=ConversionSettings)
Rows = tuple[Runs, ...]
"""Runs of each section of a layer's row."""
Plans = dict[int, Rows]
"""Rows of every converted layer."""


class Spectra(Protocol):
    """Energies over which the bytes of a layer's row are allocated."""

    def sections(self, factor: float = 1.0) -> list[Section]:
        """Return the sections of the row, with energies scaled by ``factor``."""


class Converted(Protocol):
    """Converted layer; ``clipped`` is the share of the calibration values outside the range of their channel."""

    clipped: float


@dataclass(frozen=True)
class RowLayerReport:
    """Report of one layer.

    Attributes:
        rank, rope_dim: channels of the latent and of the shared key; 0 for an unchanged layer.
        shared_rank: number of latents of earlier layers that the layer reads.
        row_bytes: bytes of a packed row.
        bits: number of channels by bit width.
        factor: measured divided by predicted loss of converting this layer alone, as used by the allocation.
        clipped: share of calibration values outside the range of their channel.
        measured: relative output error of the layer's attention on the source's inputs, by lossy stage.
    """

    layer: int
    rank: int = 0
    rope_dim: int = 0
    shared_rank: int = 0
    row_bytes: int = 0
    bits: dict[str, int] = field(default_factory=dict)
    factor: float | None = None
    clipped: float | None = None
    measured: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "latent", "rotated", "read too", "bytes per token", "measured / predicted loss", "clipped"

    def cells(self) -> tuple:
        widths = self.rank or "kept", self.rope_dim, self.shared_rank, self.row_bytes
        return *widths, short(self.factor), share(self.clipped)


class RowWriter(Protocol):
    """Writer of configs and tensors in the custom model class."""

    def config(self, source: dict) -> dict:
        """Return the config.json of the converted model."""

    def copied(self, names: list[str]) -> list[str]:
        """Select the source's attention tensors of a layer that stay unchanged."""

    def plan(self, layer: int) -> dict[str, TensorSpec]:
        """Return names, dtypes and shapes of a layer's new tensors."""


class PackedRows(Structure[Source, Settings]):
    """Abstract base class of conversions to a cache of packed rows.

    ``exact_stages`` of the report precede the quantized one; a row has at least ``least_granules`` granules. Energies
    that depend on the rows are computed in several ``passes``, each with the rows of the last one.
    """

    supports_multimodal = True
    exact_stages: ClassVar[tuple[str, ...]] = ()
    least_granules: int = 1
    passes: int = 1
    usual_ratio: ClassVar[float] = 0.25
    reason: ClassVar[str] = "no class of transformers caches values in a few bits each"

    def __init__(self, opened: Source, settings: Settings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.kept = kept_layers(settings.keep_layers, opened.windows, opened.fixed)
        self.layers = converted_layers(self.kept, opened.layers)
        # Vision-language models with windows build their own masks, in which a row's first tokens cannot be found.
        attending = range(opened.layers) if opened.reader.stored_names else self.layers
        if opened.stateful or any(opened.windows[layer] is not None for layer in attending):
            raise SurgeryError(
                "a cache of packed rows needs full attention in every converted layer (in vision-language models, in "
                "all layers), but some have a sliding window or a recurrent state; use --to lowrank without --bits",
                setting="bits",
            )
        first = opened.first
        self.granule, ratio = self.granule_bytes(), self.ratio()
        self.row_budget = ratio * first.kv_width * first.q.dtype.itemsize - self.other_bytes()
        if self.row_budget < self.least_granules * self.granule:
            raise SurgeryError(
                f"kv_ratio {ratio:g} leaves {max(0, int(self.row_budget))} bytes per token and layer, but a row needs "
                f"at least {self.least_granules * self.granule}; raise kv_ratio",
                setting="kv_ratio",
            )
        self.plans: Plans | None = None
        self._factors: dict[int, float] = {}

    def granule_bytes(self) -> int:
        """Return the granule: every run of a row is a multiple of these bytes."""
        return granule_of(self.opened.first.kv_width)

    def ratio(self) -> float:
        """Return the KV ratio, by default ``usual_ratio``."""
        return self.usual_ratio if self.settings.kv_ratio is None else self.settings.kv_ratio

    def other_bytes(self) -> int:
        """Return the bytes per token and layer that are not packed values."""
        return 0

    @abstractmethod
    def likely(self, granules: int) -> Rows:
        """Return a plausible row of ``granules`` granules, before any measurement."""

    @abstractmethod
    def writer(self, plans: Plans) -> RowWriter:
        """Create the writer of layers with these rows."""

    @abstractmethod
    def spectra(self, work: ConversionContext, layer: int, rows: Rows) -> Spectra:
        """Compute the energies of a layer; called in the order of the layers, with plausible rows."""

    @abstractmethod
    def converted(self, work: ConversionContext, index: int, layer: StreamedLayer, rows: Rows) -> Converted:
        """Convert a layer."""

    @abstractmethod
    def attended(self, index: int, result: Converted) -> Attended:
        """Return the function that computes a converted layer's head outputs, for the refit."""

    @abstractmethod
    def with_output(self, result: Converted, refit: Callable[[Tensor], Tensor]) -> Converted:
        """Return a converted layer with another output projection, a function of the present one [D, H, e]."""

    @abstractmethod
    def simulated(self, result: Converted) -> nn.Module:
        """Return a surrogate module of a converted layer; called once for every call of :meth:`converted`."""

    @abstractmethod
    def tensors(self, writer: RowWriter, index: int, result: Converted) -> dict[str, Tensor]:
        """Return a converted layer's new tensors."""

    @abstractmethod
    def widths(self, result: Converted) -> dict[str, int]:
        """Return ``rank`` and other widths for the report of a converted layer."""

    @abstractmethod
    def target(self, layers: list[RowLayerReport]) -> dict[str, Any]:
        """Return entries of the report's target, in addition to those of all packed rows."""

    def exact_forms(self, work: ConversionContext, index: int) -> dict[str, Form]:
        """Return a layer's attention for every exact stage."""
        return {}

    def is_settled(self, layer: int) -> bool:
        """Return whether the next layer needs nothing from this layer but its stages."""
        return True

    def forecast(self) -> Forecast:
        """Forecast the conversion; before :meth:`plan` as if all layers had rows of the same bytes."""
        plans = self.plans or self._likely()
        writer, dtype, first = self.writer(plans), self.opened.first.q.dtype, self.first_tokens
        config = writer.config(self.opened.reader.config)
        bytes_at = kv_bytes_of(config, dtype)
        return Forecast(
            config=config,
            tensors=replanned_tensors(self.opened, writer.copied, writer.plan, self.kept),
            kv_bytes_per_token=bytes_at(first + 1) - bytes_at(first) if first else bytes_at(1),
            model_type=MODEL_TYPE,
            reasons=[self.reason],
            demand=Demand(stages=1 + len(self.exact_stages), merges=bool(self.exact_stages)),
        )

    def gather(self, work: ConversionContext) -> None:
        """Gather moments of all tokens but the first, which the cache keeps in full precision."""
        work.gather(first_tokens=(self.first_tokens,))

    @property
    def first_tokens(self) -> int:
        return self.settings.first_tokens

    def closed_form(self, work: ConversionContext, layer: int) -> nn.Module:
        if layer in self.kept:
            return source_attention(self.opened, layer)
        with self.opened.stream.layer(layer) as streamed:
            return self.simulated(self._refitted(work, layer, streamed, self.plans[layer]))

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Allocate bits to the channels of all layers; without held-out text by predicted losses alone."""
        self._factors = dict.fromkeys(self.layers, 1.0)
        plans, spectra = self._likely(), {}
        with work.progress.phase("allocate bits", self.passes * len(self.layers)) as advance:
            for _ in range(self.passes):
                for layer in self.layers:
                    spectra[layer] = self.spectra(work, layer, plans[layer])
                    advance()
                plans = self._allocate(spectra)
        rounds = ROUNDS if work.texts.held_out.texts else 0
        with work.progress.phase("measure loss by layer", rounds * self.opened.layers) as advance:
            for number in range(rounds):
                measured = self._measured(work, plans, advance)
                for layer in self.layers:
                    predicted = sum(map(row_cost, spectra[layer].sections(), plans[layer])) / 2  # energies: 2 × loss
                    factor = min(measured[layer] / max(predicted, 1e-30), LARGEST_FACTOR)
                    self._factors[layer] = factor if not number else max(factor, self._factors[layer])
                plans = self._allocate(spectra)
        self.plans = plans
        return self.planned_tensors(plans)

    def planned_tensors(self, plans: Plans) -> dict[str, TensorSpec]:
        """Return the specs of all tensors of a result with these rows."""
        writer = self.writer(plans)
        return replanned_tensors(self.opened, writer.copied, writer.plan, self.kept)

    def _measured(self, work: ConversionContext, plans: Plans, advance: Callable[[], None]) -> dict[int, float]:
        """Measure the KL divergence of models with a single converted layer, by layer."""
        return single_layer_divergences(
            self.opened.stream,
            work.texts.calibration[:MEASURED_SEQUENCES],
            self.layers,
            lambda index, layer: self.simulated(self.converted(work, index, layer, plans[index])),
            work.settings.batch_size,
            advance,
        )

    def _allocate(self, spectra: dict[int, Spectra]) -> Plans:
        """Allocate the rows of every layer, with energies scaled by the layer's factor."""
        sections = {layer: each.sections(self._factors[layer]) for layer, each in spectra.items()}
        budget = int(self.row_budget * len(self.layers))
        runs = iter(allocate_rows([each for row in sections.values() for each in row], budget, granule=self.granule))
        return {layer: tuple(next(runs) for _ in row) for layer, row in sections.items()}

    def _refitted(self, work: ConversionContext, index: int, layer: StreamedLayer, rows: Rows) -> Converted:
        """Convert a layer, and refit its output projection to the quantized values."""
        result = self.converted(work, index, layer, rows)
        attended = self.attended(index, result)
        return self.with_output(result, lambda o: refitted_output(work, index, layer, o, attended, self.first_tokens))

    def _likely(self) -> Plans:
        """Return rows of equal bytes; the first layers get the remainder of the budget."""
        granules, rest = divmod(int(self.row_budget * len(self.layers)) // self.granule, len(self.layers))
        return {layer: self.likely(granules + (index < rest)) for index, layer in enumerate(self.layers)}

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        opened, row_writer = self.opened, self.writer(self.plans)
        runs = work.stage_runs((*self.exact_stages, QUANTIZED), exact=self.exact_stages, steps=(QUANTIZED,))
        layers = work.pass_layers(
            lambda index: self._convert(index, work, runs, row_writer), runs, RowLayerReport, settled=self.is_settled
        )
        work.converted.write(opened.layers, writer)
        return Outcome(
            config=row_writer.config(opened.reader.config),
            target={
                "model_type": MODEL_TYPE,
                "reasons": [self.reason],
                "bits": "auto",
                "row_bytes": [layer.row_bytes for layer in layers],
                "first_tokens": self.first_tokens,
                **self.target(layers),
            },
            layers=layers,
            scores=runs.scores(),
            simulated=runs.hidden[QUANTIZED],
            custom_class=True,
        )

    def _convert(self, index: int, work: ConversionContext, runs: StageTracker, writer: RowWriter) -> RowLayerReport:
        if index in self.kept:
            pass_kept(self.opened, index, runs, work.converted)
            return RowLayerReport(index)
        rows = self.plans[index]
        with self.opened.stream.layer(index) as layer:
            result = self._refitted(work, index, layer, rows)
            forms = {**self.exact_forms(work, index), QUANTIZED: lambda: self.simulated(result)}
            errors = runs.advance(layer, self.opened.anatomy(index), forms, (QUANTIZED,))
        work.converted.save(index, self.tensors(writer, index, result))
        whole = TokenFormat(tuple(run for runs_of in rows for run in runs_of))
        bits = whole.bits()
        counts = {str(width): bits.count(width) for width in sorted(set(bits))}
        facts = {"row_bytes": whole.row_bytes, "bits": counts, "factor": self._factors.get(index)}
        return RowLayerReport(index, **self.widths(result), **facts, clipped=result.clipped, measured=errors)
