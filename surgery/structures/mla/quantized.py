"""``surgery convert --to mla --bits auto``: nearly all components are kept, each in the bits that it is worth.

One budget of bytes is spent over the rotated keys and the latents of all layers; see
:mod:`surgery.transforms.quantized_mla`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from surgery.architectures.own_class import MODEL_TYPE
from surgery.architectures.own_quantized import OwnQuantizedMLA
from surgery.calibration.layer_statistics import BasisOf
from surgery.calibration.statistics import LagStatistics, LayerStatistics
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.human import share
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.rope import unchanged_length
from surgery.model.token_format import Runs, TokenFormat
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import StreamedLayer
from surgery.running.source import Source
from surgery.structures.base import Foreseen, Outcome, Structure, replanned_tensors
from surgery.structures.estimates import Demand
from surgery.structures.kept_layers import converted_layers, kept_layers
from surgery.structures.mla.output import mla_spec
from surgery.structures.mla.report import EXACT_STAGES
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.passing import pass_kept
from surgery.structures.stages import StageRuns
from surgery.structures.work import Work
from surgery.transforms import mla, quantized_mla
from surgery.transforms.key_basis import KeyBasis, identity_basis
from surgery.transforms.latent_layer import LatentLayer, SimulatedAttention
from surgery.transforms.partial_rope import latent_form
from surgery.transforms.quantized_mla import QuantizedLatents
from surgery.transforms.row_allocation import Section, allocate_rows, granule_of

PARTIAL, QUANTIZED = "partial RoPE", "quantized"
"""Lossy stages of the report."""
METHOD = mla.METHODS["fisher"]
REASON = "a cache of packed rows is of the custom model class"
ROTATION_FACTOR = 10.0
"""By which predicted losses of dropped rotations are multiplied.

At 25% of SmolLM2-135M a factor of 1 loses twice as much as 10 in KL, at 12.5% four times (docs/research/).
"""


@dataclass(frozen=True)
class QuantizedLayerReport:
    """One layer.

    Attributes:
        rank, rope_dim: channels of the latent and of the shared key; 0 where the layer stays as it is.
        row_bytes: of a token.
        bits: channels by their bits.
        rope_error: predicted share of the squared scores lost with the dropped rotations.
        clipped: share of calibration values outside the range of their channel.
        measured: relative error of the layer's own output on the source's inputs, at each lossy stage.
    """

    layer: int
    rank: int = 0
    rope_dim: int = 0
    row_bytes: int = 0
    bits: dict[str, int] = field(default_factory=dict)
    rope_error: float | None = None
    clipped: float | None = None
    measured: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def columns() -> tuple[str, ...]:
        """Heads of :meth:`cells`."""
        return "latent", "rotated", "bytes a token", "RoPE, predicted", "clipped"

    def cells(self) -> tuple:
        """For people."""
        return self.rank or "kept", self.rope_dim, self.row_bytes, share(self.rope_error), share(self.clipped)


Calibrated = tuple[AttentionAnatomy, LayerStatistics, KeyBasis, LagStatistics]


@dataclass(frozen=True)
class LayerPlan:
    """What is settled of a layer: components that keep RoPE, by descending energy, and the runs of its row."""

    rotated: Tensor
    runs: tuple[Runs, Runs]


class QuantizedMLA(Structure[Source, ConvertSettings]):
    """Keys and values become one quantized row a token, of a latent and a rotated key that all heads share."""

    beside_pictures = True

    def __init__(self, opened: Source, settings: ConvertSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        if unchanged_length(opened.config) is not None:
            raise SurgeryError(
                "RoPE longrope changes its frequencies with the length of the text, and the key that heads of MLA "
                "share rotates by one list of them: convert --to lowrank instead",
                setting="bits",
            )
        if any(window is not None for window in opened.windows):
            raise SurgeryError(
                "layers with a sliding window cannot keep a cache of packed rows: leave out --bits auto",
                setting="bits",
            )
        self.kept = kept_layers(settings.keep_layers, opened.windows, opened.fixed)
        self.layers = converted_layers(self.kept, opened.layers)
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
        self._plans: dict[int, LayerPlan] | None = None
        self._predicted: float | None = None

    @property
    def lag_basis(self) -> BasisOf | None:
        """Components are chosen by what attention does over lags."""
        return mla.lag_basis(METHOD)

    def foresee(self) -> Foreseen:
        """As if all layers had one row of 4 bits a value; its bytes are those of the budget."""
        writer, config = self._writer(self._plans or self._likely()), self.opened.reader.config
        spec = writer.spec
        result, first = writer.config(config), self.settings.first_tokens
        held = kv_bytes_of(result, spec.dtype)
        return Foreseen(
            config=result,
            tensors=replanned_tensors(self.opened, writer.copied, writer.plan, self.kept),
            kv_bytes_per_token=held(first + 1) - held(first) if first else held(1),
            model_type=MODEL_TYPE,
            reasons=[REASON],
            demand=Demand(
                cached=max(rank + 2 * len(rates) for rank, rates in zip(spec.ranks, spec.inv_freq, strict=True)),
                statistics=True,
                gradients=True,
                lags=True,
                steps=1,
                exact=len(EXACT_STAGES),
            ),
        )

    def gather(self, work: Work) -> None:
        """Moments, and what attention over lags the choice of rotated components needs."""
        work.gather(basis_of=self.lag_basis)

    def plan(self, work: Work) -> dict[str, TensorSpec]:
        """Chooses the rotated components and the bits of every channel of all layers.

        The price of a bit follows from an allocation in which everything rotates; it says which components do.
        """
        budget, sections, spectra = int(self.row_budget * len(self.layers)), [], {}
        with work.progress.phase("weigh rotations and bits", 2 * len(self.layers)) as advance:
            for layer in self.layers:
                calibrated = self._calibrated(work, layer)
                spectra[layer] = each = quantized_mla.spectra(*calibrated)
                sections += [Section(each.values), Section(each.components.sort(descending=True).values, unit=2)]
                advance()
            price = allocate_rows(sections, budget, granule=self.granule).price / 8
            sections, rotated = [], {}
            for layer, each in spectra.items():
                rotated[layer] = quantized_mla.rotated_components(each, price, ROTATION_FACTOR)
                anatomy, centred, basis, _ = self._calibrated(work, layer)
                (latents,) = mla.latent_energies(anatomy, centred, basis, [rotated[layer]])
                sections += [Section(latents, least=1), Section(each.components[rotated[layer]], unit=2)]
                advance()
        allocation = allocate_rows(sections, budget, granule=self.granule)
        runs = zip(allocation.runs[::2], allocation.runs[1::2], strict=True)
        self._plans = {layer: LayerPlan(rotated[layer], each) for layer, each in zip(self.layers, runs, strict=True)}
        writer = self._writer(self._plans)
        return replanned_tensors(self.opened, writer.copied, writer.plan, self.kept)

    def convert_layers(self, work: Work, writer: CheckpointWriter) -> Outcome:
        """The quantized form of every layer."""
        opened, written = self.opened, self._writer(self._plans)
        lossy = (PARTIAL, QUANTIZED)
        runs = work.stage_runs((*EXACT_STAGES, *lossy), exact=EXACT_STAGES, steps=lossy)
        layers = work.pass_layers(lambda index: self._convert(index, work, runs, written), runs, QuantizedLayerReport)
        work.converted.write(opened.layers, writer)
        return Outcome(
            config=written.config(opened.reader.config),
            target={
                "to": "mla",
                "method": METHOD.name,
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

    def _convert(self, index: int, work: Work, runs: StageRuns, writer: OwnQuantizedMLA) -> QuantizedLayerReport:
        """Converts and measures one layer."""
        if index in self.kept:
            pass_kept(self.opened, index, runs, work.converted)
            return QuantizedLayerReport(index)
        plan, first = self._plans[index], self.settings.first_tokens
        with self.opened.stream.layer(index) as layer:
            inputs = self._inputs(layer, work.store.load(index))
            anatomy, centred, basis, lags = self._of_inputs(work, index, inputs)
            result = quantized_mla.convert_layer(anatomy, centred, basis, lags, plan.rotated, plan.runs, inputs, first)
            partial = latent_form(anatomy, basis, plan.rotated, lags.constant())
            errors = runs.advance(layer, anatomy, self._forms(anatomy, basis, partial, result), (PARTIAL, QUANTIZED))
        tensors = writer.tensors(index, result.layer.to("cpu", torch.float64))
        work.converted.save(index, tensors | writer.quantizer_tensors(index, result.quantizer))
        return _report(index, plan.runs, result, errors)

    def _forms(self, exact: AttentionAnatomy, basis: KeyBasis, partial: LatentLayer, result: QuantizedLatents) -> dict:
        """A layer's attention in every stage."""
        stream, every = self.opened.stream, torch.arange(basis.components)
        identity = identity_basis(exact.kv_heads, exact.head_dim // 2)
        read = quantized_mla.reader(result.layer, result.quantizer, self.settings.first_tokens)
        forms = {
            "merged": (lambda: latent_form(exact, identity, every), None),
            "rotated": (lambda: latent_form(exact, basis, every), None),
            PARTIAL: (lambda: partial, None),
            QUANTIZED: (lambda: result.layer, read),
        }
        return {
            name: lambda form=form, read=read: SimulatedAttention(form().to(stream.device, stream.dtype), read=read)
            for name, (form, read) in forms.items()
        }

    def _calibrated(self, work: Work, layer: int) -> Calibrated:
        with self.opened.stream.layer(layer) as streamed:
            return self._of_inputs(work, layer, self._inputs(streamed, work.store.load(layer)))

    def _of_inputs(self, work: Work, layer: int, inputs: Tensor) -> Calibrated:
        """A layer in float64, its centred statistics, the basis of its keys, and lags over that."""
        anatomy, (statistics, lags) = self.opened.anatomy(layer), work.library.load(layer)
        live = anatomy.to(self.opened.stream.device, self.opened.stream.dtype)
        centred = quantized_mla.centred(live, statistics, inputs, self.settings.first_tokens)
        exact = anatomy.to(torch.float64)
        return exact, centred, mla.key_basis(METHOD, exact, statistics, None), lags

    @torch.no_grad()
    def _inputs(self, layer: StreamedLayer, hidden: Tensor) -> Tensor:
        """What enters the attention in the source model, [N, T, D]."""
        stream = self.opened.stream
        rows = hidden.split(self.settings.batch_size)
        return torch.cat([layer.attention_inputs(part.to(stream.device, stream.dtype)) for part in rows])

    def _likely(self) -> dict[int, LayerPlan]:
        """A plan of the same bytes in every layer, two thirds of them for the latent."""
        pieces = int(self.row_budget) // self.granule
        rope = pieces // 3 * self.granule
        most = self.opened.first.kv_heads * self.opened.first.head_dim // 2  # bytes of all components in 4 bits
        rope = min(rope, most // self.granule * self.granule)
        runs = (("4+4", pieces * self.granule - rope),), (("4+4", rope),) if rope else ()
        return dict.fromkeys(self.layers, LayerPlan(torch.zeros(rope, dtype=torch.long), runs))

    def _writer(self, plans: dict[int, LayerPlan]) -> OwnQuantizedMLA:
        opened = self.opened
        pairs = opened.first.head_dim // 2
        ranks, frequencies, runs = [], [], []
        for layer in range(opened.layers):
            plan = plans.get(layer)
            inv_freq = opened.family.rotation(opened.config, layer).inv_freq
            if plan is None:
                ranks.append(0), frequencies.append(inv_freq[:0]), runs.append(None)
                continue
            latent, rope = plan.runs
            ranks.append(TokenFormat(latent).channels)
            frequencies.append(quantized_mla.row_frequencies(inv_freq, plan.rotated % pairs, rope))
            runs.append(plan.runs)
        return OwnQuantizedMLA(
            mla_spec(opened, tuple(ranks), tuple(frequencies)), tuple(runs), self.settings.first_tokens
        )


def _report(
    index: int, runs: tuple[Runs, Runs], result: QuantizedLatents, errors: dict[str, float]
) -> QuantizedLayerReport:
    whole = TokenFormat((*runs[0], *runs[1]))
    bits = whole.bits()
    return QuantizedLayerReport(
        index,
        result.layer.rank,
        result.layer.rope_dim,
        whole.row_bytes,
        {str(width): bits.count(width) for width in sorted(set(bits))},
        result.rope_error,
        result.clipped,
        errors,
    )
