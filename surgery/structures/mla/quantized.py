"""``surgery convert --to mla --bits auto``: nearly all components are kept, each in the bits that it is worth.

One budget of bytes is spent over the rotated keys and the latents of all layers; see
:mod:`surgery.transforms.quantized_mla`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surgery.architectures.own_class import MODEL_TYPE
from surgery.architectures.own_quantized import OwnQuantizedMLA
from surgery.calibration.statistics import LayerStatistics
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.human import share, short
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.model.token_format import Runs, TokenFormat
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import StreamedLayer
from surgery.running.source import Source
from surgery.structures.base import Forecast, Outcome, Structure, replanned_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.kept_layers import converted_layers, kept_layers
from surgery.structures.mla.output import mla_spec, refuse_longrope
from surgery.structures.mla.report import EXACT_STAGES
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.passing import pass_kept
from surgery.structures.single_layers import single_layer_divergences
from surgery.structures.stages import Form, StageTracker
from surgery.transforms import mla, quantized_mla
from surgery.transforms.key_basis import KeyBasis, identity_basis
from surgery.transforms.latent_layer import SimulatedAttention
from surgery.transforms.partial_rope import latent_form
from surgery.transforms.quantized_mla import LayerSpectra, QuantizedLatents
from surgery.transforms.row_allocation import allocate_rows, granule_of

QUANTIZED = "quantized"
"""Lossy stage of the report."""
REASON = (
    "packed rows need the custom model class; --carrier stock writes what engines load without code of ours, "
    "and loses more at equal bytes"
)
MEASURED_SEQUENCES = 1
"""Calibration sequences on which the loss of each layer is measured. KL divergences settle on a thousand tokens."""
ROUNDS = 2
"""Of measuring and spending. With one, a layer of SmolLM2-135M at a quarter was left with an output error of 44%."""
LARGEST_FACTOR = 1e4


@dataclass(frozen=True)
class QuantizedLayerReport:
    """One layer.

    Attributes:
        rank, rope_dim: channels of the latent and of the shared key; 0 where the layer stays unchanged.
        row_bytes: of a token.
        bits: channels by their bits.
        factor: measured over predicted loss of this layer alone, by which the budget was spent.
        clipped: share of calibration values outside the range of their channel.
        measured: relative error of the layer's own output on the source's inputs, at each lossy stage.
    """

    layer: int
    rank: int = 0
    rope_dim: int = 0
    row_bytes: int = 0
    bits: dict[str, int] = field(default_factory=dict)
    factor: float | None = None
    clipped: float | None = None
    measured: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def columns() -> tuple[str, ...]:
        """Heads of :meth:`cells`."""
        return "latent", "rotated", "bytes a token", "loss over predicted", "clipped"

    def cells(self) -> tuple:
        """Return the values of the row, for people."""
        return self.rank or "kept", self.rope_dim, self.row_bytes, short(self.factor), share(self.clipped)


Calibrated = tuple[AttentionAnatomy, LayerStatistics, KeyBasis]
Plans = dict[int, tuple[Runs, Runs]]
"""Runs of the latent and of the shared key of every converted layer."""


class QuantizedMLA(Structure[Source, ConvertSettings]):
    """Keys and values become one quantized row a token, of a latent and a rotated key that all heads share."""

    supports_multimodal = True

    def __init__(self, opened: Source, settings: ConvertSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        refuse_longrope(opened)
        self.kept = kept_layers(settings.keep_layers, opened.windows, opened.fixed)
        self.layers = converted_layers(self.kept, opened.layers)
        if any(opened.windows[layer] is not None for layer in self.layers):
            raise SurgeryError(
                "layers with a sliding window cannot keep a cache of packed rows: leave out --bits auto, or name such "
                "layers with --keep-layers",
                setting="bits",
            )
        first = opened.first
        self.granule = granule_of(first.kv_width)
        ratio = 0.25 if settings.kv_ratio is None else settings.kv_ratio
        gains = 2 * first.key_gains if first.k_norm is not None else 0
        # Of one layer: what is left for packed values.
        self.row_budget = ratio * first.kv_width * first.q.dtype.itemsize - gains
        if self.row_budget < 2 * self.granule:
            raise SurgeryError(
                f"kv_ratio {ratio:g} leaves {max(0, int(self.row_budget))} bytes per token and layer, and a row has "
                f"{2 * self.granule} at least: ask for more",
                setting="kv_ratio",
            )
        self._plans: Plans | None = None
        self._orders: dict[int, Tensor] = {}
        self._factors: dict[int, float] = {}

    def forecast(self) -> Forecast:
        """Forecast the conversion as if all layers had one row of 4 bits a value; its bytes are those of the budget."""
        writer, config = self._writer(self._plans or self._likely()), self.opened.reader.config
        spec = writer.spec
        result, first = writer.config(config), self.settings.first_tokens
        bytes_at = kv_bytes_of(result, spec.dtype)
        return Forecast(
            config=result,
            tensors=replanned_tensors(self.opened, writer.copied, writer.plan, self.kept),
            kv_bytes_per_token=bytes_at(first + 1) - bytes_at(first) if first else bytes_at(1),
            model_type=MODEL_TYPE,
            reasons=[REASON],
            demand=Demand(
                cached=max(rank + 2 * len(rates) for rank, rates in zip(spec.ranks, spec.inv_freq, strict=True)),
                statistics=True,
                gradients=True,
                steps=1,
                exact=len(EXACT_STAGES),
            ),
        )

    def gather(self, work: ConversionContext) -> None:
        """Moments of all but the first tokens, which the cache keeps in full precision."""
        work.gather(first=self.settings.first_tokens)

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Chooses the bits of every channel of all layers.

        To second order energies say what a layer loses; really it is several times as much, and not by one factor. So
        what is planned by them is measured, one layer at a time, and the budget spent again by what was found. A layer
        that then gets less may lose far more than its factor says: it is measured once more, and the larger one counts.
        """
        spectra = {}
        with work.progress.phase("weigh bits", len(self.layers)) as advance:
            for layer in self.layers:
                spectra[layer] = quantized_mla.spectra(*self._calibrated(work, layer))
                self._orders[layer] = spectra[layer].order
                advance()
        plans, predicted = self._spend(spectra, dict.fromkeys(self.layers, 1.0))
        steps = ROUNDS * self.opened.stream.num_layers
        with work.progress.phase("measure what each layer loses", steps) as advance:
            for _ in range(ROUNDS):
                measured = self._measured(work, plans, advance)
                for layer in self.layers:
                    factor = min(measured[layer] / max(predicted[layer], 1e-30), LARGEST_FACTOR)
                    self._factors[layer] = max(factor, self._factors.get(layer, 0.0))
                plans, predicted = self._spend(spectra, self._factors)
        self._plans = plans
        writer = self._writer(self._plans)
        return replanned_tensors(self.opened, writer.copied, writer.plan, self.kept)

    def _measured(self, work: ConversionContext, plans: Plans, advance: Callable[[], None]) -> dict[int, float]:
        """Return the loss increase of the model where one layer alone follows its plan."""
        return single_layer_divergences(
            self.opened.stream,
            work.texts.calibration[:MEASURED_SEQUENCES],
            self.layers,
            lambda index, layer: self._simulated(
                self._converted(work, index, layer, plans[index], self._calibrated(work, index))
            ),
            work.settings.batch_size,
            advance,
        )

    def _spend(self, spectra: dict[int, LayerSpectra], factors: dict[int, float]) -> tuple[Plans, dict[int, float]]:
        """The runs of every layer by energies times a factor, and the loss that energies predict of each."""
        sections = [section for layer, each in spectra.items() for section in each.sections(factors[layer])]
        allocation = allocate_rows(sections, int(self.row_budget * len(self.layers)), granule=self.granule)
        runs, costs = allocation.runs, allocation.costs
        pairs = zip(self.layers, runs[::2], runs[1::2], strict=True)
        predicted = {
            layer: (latent + rope) / 2 / factors[layer]  # energies are twice the loss
            for layer, latent, rope in zip(self.layers, costs[::2], costs[1::2], strict=True)
        }
        return {layer: (latent, rope) for layer, latent, rope in pairs}, predicted

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """The quantized form of every layer."""
        opened, written = self.opened, self._writer(self._plans)
        runs = work.stage_runs((*EXACT_STAGES, QUANTIZED), exact=EXACT_STAGES, steps=(QUANTIZED,))
        layers = work.pass_layers(lambda index: self._convert(index, work, runs, written), runs, QuantizedLayerReport)
        work.converted.write(opened.layers, writer)
        return Outcome(
            config=written.config(opened.reader.config),
            target={
                "to": "mla",
                "method": quantized_mla.METHOD.name,
                "model_type": MODEL_TYPE,
                "reasons": [REASON],
                "bits": "auto",
                "kv_lora_rank": None,
                "kv_lora_ranks": [layer.rank for layer in layers],
                "rope_dim": None,
                "rope_dims": [layer.rope_dim for layer in layers],
                "row_bytes": [layer.row_bytes for layer in layers],
                "first_tokens": self.settings.first_tokens,
            },
            layers=layers,
            scores=runs.scores(),
            simulated=runs.hidden[QUANTIZED],
            own_class=True,
        )

    def _convert(
        self, index: int, work: ConversionContext, runs: StageTracker, writer: OwnQuantizedMLA
    ) -> QuantizedLayerReport:
        """Converts and measures one layer."""
        if index in self.kept:
            pass_kept(self.opened, index, runs, work.converted)
            return QuantizedLayerReport(index)
        with self.opened.stream.layer(index) as layer:
            anatomy, _, basis = calibrated = self._calibrated(work, index)
            result = self._converted(work, index, layer, self._plans[index], calibrated)
            errors = runs.advance(layer, anatomy, self._forms(anatomy, basis, result), (QUANTIZED,))
        tensors = writer.tensors(index, result.layer.to("cpu", torch.float64))
        work.converted.save(index, tensors | writer.quantizer_tensors(index, result.quantizer))
        return _report(index, self._plans[index], self._factors[index], result, errors)

    def _forms(self, anatomy: AttentionAnatomy, basis: KeyBasis, result: QuantizedLatents) -> dict[str, Form]:
        """A layer's attention in every stage."""
        stream, every = self.opened.stream, torch.arange(basis.components)
        bases = {"merged": identity_basis(anatomy.kv_heads, anatomy.head_dim // 2), "rotated": basis}
        forms = {
            name: lambda basis=each: SimulatedAttention(
                latent_form(anatomy, basis, every).to(stream.device, stream.dtype)
            )
            for name, each in bases.items()
        }
        return {**forms, QUANTIZED: lambda: self._simulated(result)}

    def _simulated(self, result: QuantizedLatents) -> SimulatedAttention:
        stream = self.opened.stream
        read = quantized_mla.reader(result.layer, result.quantizer, self.settings.first_tokens)
        return SimulatedAttention(result.layer.to(stream.device, stream.dtype), read=read)

    def _converted(
        self, work: ConversionContext, index: int, layer: StreamedLayer, runs: tuple[Runs, Runs], calibrated: Calibrated
    ) -> QuantizedLatents:
        inputs, first = work.attention_inputs(index, layer), self.settings.first_tokens
        return quantized_mla.convert_layer(*calibrated, self._orders[index], runs, inputs, first)

    def _calibrated(self, work: ConversionContext, layer: int) -> Calibrated:
        """A layer in float64, its centred statistics, and the basis of its keys."""
        anatomy, (statistics, _) = self.opened.anatomy(layer).to(torch.float64), work.library.load(layer)
        centred = quantized_mla.centred(statistics)
        return anatomy, centred, mla.key_basis(quantized_mla.METHOD, anatomy, centred, None)

    def _likely(self) -> Plans:
        """Return plans of equal bytes in every layer, half of them for the latent."""
        pieces, first = int(self.row_budget) // self.granule, self.opened.first
        most = first.kv_heads * first.head_dim // 2 // self.granule  # all components in 4 bits
        rope = min(pieces // 2, most) * self.granule
        runs = (("4+4", pieces * self.granule - rope),), (("4+4", rope),) if rope else ()
        return dict.fromkeys(self.layers, runs)

    def _writer(self, plans: Plans) -> OwnQuantizedMLA:
        """Writes these plans; before the components are ordered, frequencies are those of the first ones."""
        opened, ranks, frequencies, runs = self.opened, [], [], []
        for layer in range(opened.layers):
            inv_freq, plan = opened.family.rotation(opened.config, layer).inv_freq, plans.get(layer)
            latent, rope = plan or ((), ())
            order = self._orders.get(layer, torch.arange(opened.first.kv_heads * len(inv_freq)))
            ranks.append(TokenFormat(latent).channels)
            # Component c * pairs + l turns at frequency l (`energy_basis`).
            frequencies.append(quantized_mla.row_frequencies(inv_freq, order % len(inv_freq), rope))
            runs.append(plan)
        spec = mla_spec(opened, tuple(ranks), tuple(frequencies))
        return OwnQuantizedMLA(spec, tuple(runs), self.settings.first_tokens)


def _report(
    index: int, runs: tuple[Runs, Runs], factor: float, result: QuantizedLatents, errors: dict[str, float]
) -> QuantizedLayerReport:
    whole = TokenFormat((*runs[0], *runs[1]))
    bits = whole.bits()
    return QuantizedLayerReport(
        index,
        result.layer.rank,
        result.layer.rope_dim,
        whole.row_bytes,
        {str(width): bits.count(width) for width in sorted(set(bits))},
        factor,
        result.clipped,
        errors,
    )
