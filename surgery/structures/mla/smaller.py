"""``surgery convert --to mla`` for models that are MLA already: a smaller latent rank in the source's class.

Rotary dimensions, queries and output projection stay unchanged. Every layer keeps a subspace of its latent, chosen in
the metric of the loss. The latent norm then lacks the dropped part (:mod:`surgery.transforms.smaller_latent`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.multimodal import whole_config
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.human import share
from surgery.common.progress import Progress
from surgery.engines.table import refuse_unless_loadable
from surgery.families import latent_family_of
from surgery.families.attention import CapturedAttention
from surgery.families.base import ATTENTION_PREFIX, MTP_LAYERS, is_mtp_layer
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.families.latent_family import DOWN, NORM, UP
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import Source
from surgery.structures.base import Candidate, Forecast, Outcome, Structure, unchanged_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.kept_layers import AUTO, NONE
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.stages import StageTracker
from surgery.transforms.smaller_latent import norm_error, smaller_latent

EXACT, SMALLER = "rotated", "truncated"
"""Stages after the source: the whole latent in another basis, then the kept latent."""

TAKEN = {
    "method": (("fisher",), "latents are chosen by the loss"),
    "allocate": (("auto", "uniform"), "its class has one rank for all layers"),
    "keep_layers": ((AUTO, NONE), "its class has one rank for all layers"),
    "bits": ((None,), "quantized rows of its latents are not supported yet"),
    "predict_values": ((None,), "quantized rows of its latents are not supported yet"),
    "carrier": (("auto", "stock"), "it keeps its class"),
    "freqfold": ((None,), "its rotary dimensions stay"),
}
"""Allowed values of settings for a source that is MLA already, and the reason for the restriction."""


@dataclass(frozen=True)
class SmallerLayerReport:
    """Errors of one layer.

    Attributes:
        latent_error: predicted squared error of the latent in the metric of the loss, with that of the norm; its share.
        norm_error: measured relative error of the latent norm, root mean square over tokens.
        energies: energies of all latent dimensions of the source, descending, in the metric of ``latent_error``.
        measured: relative output error of the layer's attention on the source's inputs, by stage.
    """

    layer: int
    rank: int
    latent_error: float
    latent_error_share: float
    norm_error: float
    energies: list[float] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def columns() -> tuple[str, ...]:
        return "rank", "latent, predicted", "norm off by"

    def cells(self) -> tuple:
        return self.rank, share(self.latent_error_share), share(self.norm_error)


class SmallerMLA(Structure[Source, ConvertSettings]):
    """Conversion of an MLA model to a smaller latent rank."""

    keeps_class = takes_latents = True

    def __init__(self, opened: Source, settings: ConvertSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        config = opened.config
        rank = requested_rank(settings, config.kv_lora_rank, config.qk_rope_head_dim)
        self._writes = SmallerLatents(opened.reader, opened.layers, rank, config.qk_rope_head_dim)
        if settings.engine is not None:
            refuse_unless_loadable(settings.engine, whole_config(opened.reader, self._writes.config()))

    @classmethod
    def open(cls, reader: CheckpointReader, settings: ConvertSettings) -> Source:
        """Open a checkpoint of an MLA family.

        Raises SurgeryError: a setting does not apply to MLA sources; or as :meth:`Structure.open`.
        """
        kind = reader.config["model_type"]
        for name, (allowed, why) in TAKEN.items():
            value = getattr(settings, name)
            if value not in allowed:
                raise SurgeryError(f"{name} {value}: {reader.source} is MLA already ({kind}); {why}")
        family = latent_family_of(reader.config)
        if family.inside is not None and not reader.stored_names:
            raise SurgeryError.at(
                reader.source,
                f"{kind} cannot be loaded alone by AutoModelForCausalLM: convert the complete "
                f"{family.inside} checkpoint that contains it",
            )
        return Source.of(reader, settings, family)

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        return [Candidate({})]

    def forecast(self) -> Forecast:
        """Forecast the conversion; config and shapes do not depend on the calibration."""
        writes, config = self._writes, self._writes.config()
        return Forecast(
            config=config,
            tensors=self._tensors(),
            kv_bytes_per_token=kv_bytes_of(config, self.opened.weight_dtype)(1),
            model_type=writes.model_type,
            reasons=writes.reasons(),
            demand=Demand(stages=2, merges=True),
        )

    def gather(self, work: ConversionContext) -> None:
        work.gather(gradients=True)

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Return the specs of all tensors, with the smaller rank in the projections to and from the latent."""
        return self._tensors()

    def closed_form(self, work: ConversionContext, layer: int) -> nn.Module:
        anatomy, stream = self.opened.anatomy(layer).to(torch.float64), self.opened.stream
        smaller = smaller_latent(anatomy, work.library.load(layer)[0], self._writes.rank).layer
        return CapturedAttention(smaller.to(stream.device, stream.dtype))

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        runs = work.stage_runs((EXACT, SMALLER), exact=(EXACT,))
        layers = work.pass_layers(lambda index: self._convert(index, work, runs), runs, SmallerLayerReport)
        work.converted.write(self.opened.layers, writer)
        writes = self._writes
        return Outcome(
            config=writes.config(),
            target={
                "to": "mla",
                "method": self.settings.method,
                "model_type": writes.model_type,
                "reasons": writes.reasons(),
                "kv_lora_rank": writes.rank,
                "kv_lora_ranks": [writes.rank] * self.opened.layers,
                "rope_dim": writes.rope_dim,
                "norm_error": max(layer.norm_error for layer in layers),
            },
            layers=layers,
            scores=runs.scores(),
            simulated=runs.hidden[SMALLER],
        )

    def _tensors(self) -> dict[str, TensorSpec]:
        return self._writes.plan(unchanged_tensors(self.opened.reader, self.opened.config))

    def _convert(self, index: int, work: ConversionContext, runs: StageTracker) -> SmallerLayerReport:
        stream, anatomy = self.opened.stream, self.opened.anatomy(index).to(torch.float64)
        statistics, _ = work.library.load(index)
        smaller = smaller_latent(anatomy, statistics, self._writes.rank)

        def run(layer: LatentAnatomy) -> CapturedAttention:
            return CapturedAttention(layer.to(stream.device, stream.dtype))

        forms = {
            EXACT: lambda: run(smaller_latent(anatomy, statistics, anatomy.rank).layer),
            SMALLER: lambda: run(smaller.layer),
        }
        with stream.layer(index) as layer:
            inputs = layer.attention_inputs(runs.sample())
            off = norm_error(anatomy, smaller.layer, inputs.to("cpu", torch.float64))
            errors = runs.advance(layer, anatomy, forms, (SMALLER,))
        work.converted.save(index, self._writes.tensors(index, smaller.layer))
        energy = max(float(smaller.energy.sum()), 1e-300)
        return SmallerLayerReport(
            index, smaller.layer.rank, smaller.error, smaller.error / energy, off, smaller.energy.tolist(), errors
        )


def requested_rank(settings: ConvertSettings, rank: int, rope_dim: int) -> int:
    """Compute the rank of the result, by default half of the source's.

    Raises SurgeryError: the rank is odd or out of range, or the settings conflict or change the rotary dimensions.
    """
    if settings.rope_dim not in (None, rope_dim):
        raise SurgeryError(
            f"rope_dim {settings.rope_dim}: the source is MLA already and keeps its {rope_dim} rotary dimensions",
            setting="rope_dim",
        )
    if settings.kv_lora_rank is not None and settings.kv_ratio is not None:
        raise SurgeryError(
            "pass either kv_ratio or kv_lora_rank, as an MLA source keeps its rotary dimensions", setting="kv_lora_rank"
        )
    result = settings.kv_lora_rank
    if result is None:
        share = rank / 2 if settings.kv_ratio is None else settings.kv_ratio * (rank + rope_dim) + 1e-9 - rope_dim
        result = 2 * math.floor(share / 2)
    if not 2 <= result < rank or result % 2:
        raise SurgeryError(
            f"kv_lora_rank {result}: the source has rank {rank} and {rope_dim} rotary dimensions, which stay; choose "
            f"an even kv_lora_rank from 2 to {rank - 1} (deepseek_v2 of transformers reads pairs), or another kv_ratio"
        )
    return result


@dataclass(frozen=True)
class SmallerLatents:
    """Writer of MLA with a smaller rank, in the source's class; ``layers`` are those without MTP layers."""

    reader: CheckpointReader
    layers: int
    rank: int
    rope_dim: int

    @property
    def model_type(self) -> str:
        return self.reader.config["model_type"]

    def config(self) -> dict[str, Any]:
        """Return the source's config.json with the new rank."""
        config = {**self.reader.config, "kv_lora_rank": self.rank}
        return {**config, MTP_LAYERS: 0} if config.get(MTP_LAYERS) else config

    def plan(self, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """Return the dtypes and shapes of the output checkpoint's tensors, from those of the source."""
        changed = {
            f"{ATTENTION_PREFIX.format(layer=layer)}{module}.{kind}": shape
            for layer in range(self.layers)
            for (module, kind), shape in self._shapes(tensors, layer).items()
        }
        return {name: TensorSpec(spec.dtype, changed.get(name, spec.shape)) for name, spec in tensors.items()}

    def reasons(self) -> list[str]:
        """Return the reason for the class, and a note on MTP layers that are left out."""
        messages = ["the source's own class holds the new rank"]
        if further := {name.split(".")[2] for name in self.reader.names() if is_mtp_layer(name, self.layers)}:
            messages.append(f"MTP layers are left out ({len(further)})")
        return messages

    def tensors(self, layer: int, smaller: LatentAnatomy) -> dict[str, Tensor]:
        """Return a layer's new tensors by their full names, in the source's dtypes.

        The norm's weight is a power of two, which no dtype rounds, near the source's.
        """
        rank, prefix = smaller.rank, ATTENTION_PREFIX.format(layer=layer)
        typical = float(self.reader.tensor(f"{prefix}{NORM}.weight").double().abs().mean())
        weight = 2.0 ** round(math.log2(typical)) if typical else 1.0

        def stored(rows: Tensor) -> Tensor:
            rotated = rows[rank:] if smaller.order is None else rows[rank:][smaller.order.argsort()]
            return torch.cat([rows[:rank], rotated])

        result = {
            f"{DOWN}.weight": stored(smaller.down),
            f"{NORM}.weight": torch.full((rank,), weight),
            f"{UP}.weight": smaller.up.flatten(0, 1) / weight,
        }
        if smaller.down_bias is not None:
            result[f"{DOWN}.bias"] = stored(smaller.down_bias)
        return {
            prefix + name: tensor.to(self.reader.info(prefix + name).dtype).contiguous()
            for name, tensor in result.items()
        }

    def _shapes(self, tensors: Mapping[str, TensorSpec], layer: int) -> dict[tuple[str, str], tuple[int, ...]]:
        prefix, width = ATTENTION_PREFIX.format(layer=layer), self.rank + self.rope_dim
        return {
            (DOWN, "weight"): (width, *tensors[f"{prefix}{DOWN}.weight"].shape[1:]),
            (DOWN, "bias"): (width,),
            (NORM, "weight"): (self.rank,),
            (UP, "weight"): (tensors[f"{prefix}{UP}.weight"].shape[0], self.rank),
        }
