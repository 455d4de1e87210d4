"""``surgery convert --to mla``: keys and values become a latent and a rotated key that all heads share.

Candidate splits of the budget are tried on held-out text. Then every layer is converted, and all stages run through it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig

from surgery.architectures.choose import Carrier
from surgery.architectures.deepseek_v3 import StockMLA
from surgery.architectures.neutral_norm import neutral_norm
from surgery.architectures.spec import MLASpec
from surgery.calibration.layer_statistics import BasisOf
from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.engines.limits import FAST_ROPE, FAST_WIDTH
from surgery.families import LATENT_FAMILIES, head_shape
from surgery.model.configuration_surgery import SurgeryConfig
from surgery.model.latent_entry import LatentEntry
from surgery.model.quantized_latent_entry import QuantizedLatentEntry
from surgery.running.layer_stream import StreamedLayer
from surgery.running.source import Source
from surgery.structures.base import Candidate, ConfigOf, Forecast, Outcome, Structure, TargetOption
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.kept_layers import kept_layers
from surgery.structures.mla.budget import candidate_splits
from surgery.structures.mla.forecast import forecast_split
from surgery.structures.mla.output import all_tensors, carrier_of, refuse_longrope, reserved_numbers
from surgery.structures.mla.plans import UNTRIED_WEIGHT, MLAPlan, Planner, search_plans, try_plans
from surgery.structures.mla.quantized import QuantizedMLA, exact_forms
from surgery.structures.mla.report import EXACT_STAGES, LOSSY_STAGES, LayerReport, mla_target
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.mla.smaller import SmallerMLA
from surgery.structures.passing import pass_kept, source_attention
from surgery.structures.refit import refitted_output
from surgery.structures.stages import StageTracker
from surgery.transforms import mla
from surgery.transforms.latent_layer import SimulatedAttention


class MLA(Structure[Source, ConvertSettings]):
    """Conversion to multi-head latent attention."""

    supports_multimodal = takes_latents = True
    options = (
        TargetOption(option_rank=1),
        TargetOption(" --carrier stock", {"carrier": "stock"}, option_rank=4),
        # The sizes that vLLM's GPU kernels support, for models that are wide enough.
        TargetOption(
            f" --engine vllm --kv-lora-rank {FAST_WIDTH - FAST_ROPE} --rope-dim {FAST_ROPE}",
            {"engine": "vllm", "kv_lora_rank": FAST_WIDTH - FAST_ROPE, "rope_dim": FAST_ROPE},
            optional=True,
        ),
        TargetOption(" --engine llama.cpp", {"engine": "llama.cpp"}),
    )

    def __init__(self, opened: Source, settings: ConvertSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        refuse_longrope(opened)
        if opened.reader.stored_names and opened.family.axes and mla.METHODS[settings.method].folds:
            raise SurgeryError(
                f"method {settings.method} merges neighboring rotary pairs, but those of {opened.family.model_type} "
                "use positions of different image axes: drop --method",
                setting="method",
            )
        first = opened.first
        self.kept = kept_layers(settings.keep_layers, opened.windows, opened.fixed)
        self.splits = candidate_splits(settings, first, reserved_numbers(opened, settings, first))
        # Raises if the engine does not support the result.
        self.stock = forecast_split(opened, self.splits[0], settings).carrier.stock
        self._carrier: Carrier | None = None

    @classmethod
    def for_source(cls, config: Mapping[str, Any], settings: ConvertSettings) -> type[Structure]:
        """Return the class for the source and the bits; a model that is MLA already keeps its model class."""
        if config.get("model_type") in LATENT_FAMILIES:
            return SmallerMLA
        return QuantizedMLA if settings.bits == "auto" else cls

    @classmethod
    def over(cls, opened: Source, settings: ConvertSettings, progress: Progress) -> Structure:
        """Create the structure, with packed rows if settings and source allow them: they lose least at equal bytes."""
        if cls is MLA and settings.is_open:
            try:
                return QuantizedMLA(opened, settings, progress)
            except SurgeryError as error:
                progress.note(f"no quantized rows: {error}")
        return cls(opened, settings, progress)

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return the candidates: the stock class, the custom model class, and packed rows."""
        if config["model_type"] in LATENT_FAMILIES:
            return SmallerMLA.candidates(config)
        return [Candidate({"carrier": "stock"}), Candidate({"carrier": "own"}), Candidate({"bits": "auto"})]

    @classmethod
    def bench_configs(cls) -> dict[str, ConfigOf]:
        """Return the configs of the stock class, of the custom model class, and of packed rows."""
        return {"": stock_mla, "-own": own_mla, "-bits": mla_in_bits}

    def forecast(self) -> Forecast:
        """Forecast the split with the largest cache; before :meth:`plan` the rotary frequencies may be unknown."""
        opened, settings = self.opened, self.settings
        forecasts = [forecast_split(opened, split, settings) for split in self.splits]
        largest = max(forecasts, key=lambda each: each.kv_bytes_per_token)
        carrier = self._carrier or largest.carrier
        return Forecast(
            config=carrier.writer.config(opened.reader.config),
            tensors=all_tensors(opened, carrier.writer, self.kept),
            kv_bytes_per_token=largest.kv_bytes_per_token,
            model_type="deepseek_v3" if carrier.stock else "surgery",
            reasons=list(carrier.reasons),
            demand=Demand(stages=len(EXACT_STAGES) + len(LOSSY_STAGES), merges=True),
            settled=largest.frequencies_known,
            engines=largest.engines,
        )

    @property
    def lag_basis(self) -> BasisOf | None:
        return mla.lag_basis(mla.METHODS[self.settings.method])

    def gather(self, work: ConversionContext) -> None:
        work.gather(gradients=mla.METHODS[self.settings.method].gradients, basis_of=self.lag_basis)

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Choose the split on held-out text, and the target class."""
        opened, settings = self.opened, self.settings
        self._plan, self._tried = self._choose(work)
        self._carrier = carrier_of(opened, self._plan, settings)
        return all_tensors(opened, self._carrier.writer, self.kept)

    def closed_form(self, work: ConversionContext, layer: int) -> nn.Module:
        if layer in self.kept:
            return source_attention(self.opened, layer)
        anatomy, stream = self.opened.anatomy(layer).to(torch.float64), self.opened.stream
        converted = self._plan.convert(anatomy, work.library, layer)
        with stream.layer(layer) as streamed:
            converted = self._refitted(work, layer, streamed, converted)
        return SimulatedAttention(converted.truncated.to(stream.device, stream.dtype))

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        opened, carrier = self.opened, self._carrier
        runs = work.stage_runs((*EXACT_STAGES, *LOSSY_STAGES), exact=EXACT_STAGES, steps=LOSSY_STAGES)
        layers = work.pass_layers(lambda index: self._convert(index, work, runs), runs, LayerReport)
        work.converted.write(opened.layers, writer)
        return Outcome(
            config=carrier.writer.config(opened.reader.config),
            target=mla_target(carrier, self._plan.method.name, layers),
            layers=layers,
            scores=runs.scores(),
            simulated=runs.hidden[LOSSY_STAGES[-1]],
            factors=carrier.writer.rescaled(writer.missing()) if carrier.stock else {},
            custom_class=not carrier.stock,
            splits=[{**plan.facts(), "held_out_loss": loss} for plan, loss in self._tried],
        )

    def _choose(self, work: ConversionContext) -> tuple[MLAPlan, list[tuple[MLAPlan, float | None]]]:
        """Choose the plan of least held-out loss; return it, and all tried plans with their losses."""
        opened, settings, held_out = self.opened, self.settings, work.texts.held_out
        planner = Planner(mla.METHODS[settings.method], opened, work.library, settings.rope_frequencies, self.kept)
        if settings.spreads and not self.stock:
            plans = planner.spread(self.splits, work.progress)
        else:
            plans = [planner.alike(split, one_list=self.stock) for split in self.splits]
        if len(plans) == 1 or not held_out.texts:
            # Without text: a third for rotary dimensions, the middle of what calibrated conversions choose.
            untried = min(plans, key=_distance_from_default)
            return untried, [(untried, None)]

        def losses_of(candidates: list[MLAPlan]) -> list[float]:
            return try_plans(candidates, opened, work.library, held_out, settings.batch_size, work.progress)

        losses = search_plans(plans, losses_of)
        best = min(losses, key=losses.__getitem__)
        return plans[best], [(plans[index], loss) for index, loss in sorted(losses.items())]

    def _convert(self, index: int, work: ConversionContext, runs: StageTracker) -> LayerReport:
        if index in self.kept:
            pass_kept(self.opened, index, runs, work.converted)
            return LayerReport(index)
        stream = self.opened.stream
        anatomy = self.opened.anatomy(index).to(torch.float64)
        converted = self._plan.convert(anatomy, work.library, index)
        with stream.layer(index) as layer:
            converted = self._refitted(work, index, layer, converted)
            lossy = dict(zip(LOSSY_STAGES, (converted.partial, converted.truncated), strict=True))
            forms = exact_forms(anatomy, converted.basis, stream) | {
                name: lambda form=form: SimulatedAttention(form.to(stream.device, stream.dtype))
                for name, form in lossy.items()
            }
            errors = runs.advance(layer, anatomy, forms, lossy)
        work.converted.save(index, self._tensors(index, converted))
        return LayerReport.of(index, converted, converted.energy[: converted.truncated.rank], errors)

    def _refitted(
        self, work: ConversionContext, index: int, layer: StreamedLayer, converted: mla.ConvertedLayer
    ) -> mla.ConvertedLayer:
        """Refit the output projection of the last stage; other methods than ours have none."""
        if self._plan.method is not mla.METHODS["fisher"]:
            return converted
        truncated, stream = converted.truncated, self.opened.stream
        form = truncated.to(stream.device, stream.dtype)

        def attended(inputs: Tensor, _: slice) -> Tensor:
            return form.source.gated(form.attend(inputs), inputs)

        o = refitted_output(work, index, layer, truncated.o, attended)
        return replace(converted, truncated=replace(truncated, o=o))

    def _tensors(self, index: int, converted: mla.ConvertedLayer) -> dict[str, Tensor]:
        """Return a layer's tensors; the stock class needs latents and rotary keys of mean square one."""
        layer = converted.truncated.to("cpu", torch.float64)
        if self._carrier.stock:
            layer = layer.rescaled(*(2.0 ** -round(math.log2(size)) for size in converted.sizes))
        return self._carrier.writer.tensors(index, layer)


def _distance_from_default(plan: MLAPlan) -> float:
    """Return the distance of a plan from the usual choice of trials, for sources without text to try plans on."""
    if plan.weight is not None:
        return abs(plan.weight - UNTRIED_WEIGHT)
    return abs(plan.split.rope_dim - (plan.split.rope_dim + plan.split.rank) / 3)


def stock_mla(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Return the dense `deepseek_v3` config that `surgery convert --to mla` writes."""
    heads, _, head_dim = head_shape(config)
    layers, dtype = config.num_hidden_layers, torch.bfloat16
    spec = MLASpec(
        heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        hidden=config.hidden_size,
        ranks=(rank,) * layers,
        inv_freq=(_frequencies(rope_dim),) * layers,
        dtype=dtype,
        query_bias=False,
        latent_bias=False,
        output_bias=False,
        key_norm_eps=None,
        windows=(None,) * layers,
        input_lengths=(config.hidden_size**0.5,) * layers,
    )
    plain = StockMLA(spec, neutral_norm("tiny", rank, dtype)).config(config.to_dict())
    plain.pop("model_type"), plain.pop("architectures")
    return transformers.CONFIG_MAPPING["deepseek_v3"](**plain)


def own_mla(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Return the same config for the custom model class."""
    frequencies = tuple(_frequencies(rope_dim).tolist())
    entry = LatentEntry(kv_lora_rank=rank, rope_inv_freq=frequencies, key_norm_eps=None)
    return SurgeryConfig.from_base(config, [entry.to_entry() for _ in range(config.num_hidden_layers)])


def mla_in_bits(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Return the config of packed rows: 4 bits per channel, all tokens but the first four."""
    frequencies = tuple(_frequencies(rope_dim).tolist())
    runs = {"latent_runs": (("4+4", rank // 2),), "rope_runs": (("4+4", rope_dim // 2),)}
    entry = QuantizedLatentEntry(
        kv_lora_rank=rank, rope_inv_freq=frequencies, key_norm_eps=None, first_tokens=4, **runs
    )
    return SurgeryConfig.from_base(config, [entry.to_entry() for _ in range(config.num_hidden_layers)])


def _frequencies(rope_dim: int) -> torch.Tensor:
    """Return the frequencies of default RoPE, radians per token [ρ/2]."""
    return 10_000.0 ** -(torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
