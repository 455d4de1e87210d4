"""``surgery convert --to mla --bits auto``: nearly all components are kept, and bits are allocated to each.

One byte budget is allocated over all layers; see :mod:`surgery.transforms.quantized_mla`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.own_quantized import OwnQuantizedMLA, quantizer_tensors
from surgery.calibration.statistics import LayerStatistics
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.model.token_format import TokenFormat
from surgery.running.layer_stream import LayerStream, StreamedLayer
from surgery.running.source import Source
from surgery.structures.context import ConversionContext
from surgery.structures.mla.output import mla_spec, refuse_longrope
from surgery.structures.mla.report import EXACT_STAGES
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.packed_rows import PackedRows, Plans, RowLayerReport, Rows
from surgery.structures.refit import Attended
from surgery.structures.stages import Form
from surgery.transforms import quantized_mla
from surgery.transforms.key_basis import KeyBasis, identity_basis
from surgery.transforms.latent_layer import SimulatedAttention
from surgery.transforms.partial_rope import latent_form
from surgery.transforms.quantized_mla import LayerSpectra, QuantizedLatents, ValuePrediction
from surgery.transforms.row_quantizer import reader

PREDICTED_BELOW = 0.2
"""KV ratio below which keys predict values by default. At an eighth of the bytes SmolLM2-135M and the demo model lost a
third to two fifths less, at a quarter little. No ratio between was tried, and no other model."""


class QuantizedMLA(PackedRows[ConvertSettings]):
    """Conversion to one packed row per token, of a latent and a rotated key that all heads share."""

    exact_stages = EXACT_STAGES
    least_granules = 2
    reason = (
        "no class of transformers caches latents in a few bits each; --engine NAME writes stock deepseek_v3 for an "
        "engine without our code, for models that it can hold, and loses more at equal bytes"
    )

    def __init__(self, opened: Source, settings: ConvertSettings, progress: Progress):
        refuse_longrope(opened)
        super().__init__(opened, settings, progress)
        self.predicts_values = settings.predict_values
        if self.predicts_values is None:
            self.predicts_values = self.ratio() < PREDICTED_BELOW
        self.passes = 2 if self.predicts_values else 1
        self._orders: dict[int, Tensor] = {}

    def other_bytes(self) -> int:
        """Return the bytes of the gains of a key norm."""
        first = self.opened.first
        return 2 * first.key_gains if first.k_norm is not None else 0

    def likely(self, granules: int) -> Rows:
        """Return a row of 4 bits per value, at least half of it for the latent."""
        first = self.opened.first
        limit = first.kv_heads * first.head_dim // 2 // self.granule  # all components
        rope = min(granules // 2, limit) * self.granule
        return (("4+4", granules * self.granule - rope),), (("4+4", rope),) if rope else ()

    def writer(self, plans: Plans) -> OwnQuantizedMLA:
        """Create the writer of layers with these rows; before :meth:`spectra`, components are unordered."""
        opened, ranks, frequencies, runs = self.opened, [], [], []
        for layer in range(opened.layers):
            inv_freq, plan = opened.family.rotation(opened.config, layer).inv_freq, plans.get(layer)
            latent, rope = plan or ((), ())
            order = self._orders.get(layer, torch.arange(opened.first.kv_heads * len(inv_freq)))
            ranks.append(TokenFormat(latent).channels)
            # Component c * pairs + l rotates at frequency l (`energy_basis`).
            frequencies.append(quantized_mla.row_frequencies(inv_freq, order % len(inv_freq), rope))
            runs.append(plan)
        spec = mla_spec(opened, tuple(ranks), tuple(frequencies))
        return OwnQuantizedMLA(spec, tuple(runs), self.first_tokens, self.predicts_values)

    def spectra(self, work: ConversionContext, layer: int, rows: Rows) -> LayerSpectra:
        """Compute the energies of a latent of the values and of the key components."""
        calibrated = self._calibrated(work, layer)
        spectra = quantized_mla.spectra(*calibrated)
        self._orders[layer] = spectra.order
        if not self.predicts_values:
            return spectra
        with self.opened.stream.layer(layer) as streamed:
            inputs = work.attention_inputs(layer, streamed)
        prediction = ValuePrediction.of(*calibrated, spectra.order, rows[1], inputs, self.first_tokens)
        return replace(spectra, values=prediction.latents.energy)

    def converted(self, work: ConversionContext, index: int, layer: StreamedLayer, rows: Rows) -> QuantizedLatents:
        calibrated, order = self._calibrated(work, index), self._orders[index]
        inputs, first, prediction = work.attention_inputs(index, layer), self.first_tokens, None
        if self.predicts_values:
            prediction = ValuePrediction.of(*calibrated, order, rows[1], inputs, first)
        return quantized_mla.convert_layer(*calibrated, order, rows, inputs, first, prediction)

    def attended(self, index: int, result: QuantizedLatents) -> Attended:
        surrogate = self.simulated(result)
        layer, read = surrogate.layer, surrogate.read
        return lambda inputs, _: layer.source.gated(layer.attend(inputs, read), inputs)

    def with_output(self, result: QuantizedLatents, refit: Callable[[Tensor], Tensor]) -> QuantizedLatents:
        return replace(result, layer=replace(result.layer, o=refit(result.layer.o)))

    def simulated(self, result: QuantizedLatents) -> SimulatedAttention:
        stream = self.opened.stream
        read = reader(result.quantizer, self.first_tokens, result.layer.neighboring())
        return SimulatedAttention(result.layer.to(stream.device, stream.dtype), read=read)

    def exact_forms(self, work: ConversionContext, index: int) -> dict[str, Form]:
        anatomy, _, basis = self._calibrated(work, index)
        return exact_forms(anatomy, basis, self.opened.stream)

    def tensors(self, writer: OwnQuantizedMLA, index: int, result: QuantizedLatents) -> dict[str, Tensor]:
        tensors = writer.tensors(index, result.layer.to("cpu", torch.float64))
        return tensors | quantizer_tensors(index, result.quantizer)

    def widths(self, result: QuantizedLatents) -> dict[str, int]:
        return {"rank": result.layer.rank, "rope_dim": result.layer.rope_dim}

    def target(self, layers: list[RowLayerReport]) -> dict[str, Any]:
        return {
            "to": "mla",
            "method": quantized_mla.METHOD.name,
            "kv_lora_rank": None,
            "kv_lora_ranks": [layer.rank for layer in layers],
            "rope_dim": None,
            "rope_dims": [layer.rope_dim for layer in layers],
        }

    def _calibrated(self, work: ConversionContext, layer: int) -> tuple[AttentionAnatomy, LayerStatistics, KeyBasis]:
        """Return a layer in float64, its statistics without the first tokens, and the basis of its keys."""
        anatomy = self.opened.anatomy(layer).to(torch.float64)
        statistics = work.library.load(layer, self.first_tokens)[0]
        return anatomy, statistics, quantized_mla.key_basis(anatomy, statistics)


def exact_forms(anatomy: AttentionAnatomy, basis: KeyBasis, stream: LayerStream) -> dict[str, Form]:
    """Return a layer's attention with all components kept, for every exact stage: head by head, and in the basis."""
    every = torch.arange(basis.components)
    bases = {"merged": identity_basis(anatomy.kv_heads, anatomy.head_dim // 2), "rotated": basis}
    return {
        name: lambda basis=each: SimulatedAttention(latent_form(anatomy, basis, every).to(stream.device, stream.dtype))
        for name, each in bases.items()
    }
