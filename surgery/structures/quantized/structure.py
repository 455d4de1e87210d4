"""``surgery convert --to quantized``: a checkpoint whose KV cache has a few bits.

No calibration. The result is the custom model class with the attention of the source, whichever that is; the last
stage of every conversion with bits, :mod:`surgery.structures.quantized.stage`, is all that happens to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from surgery.architectures.cached import REASON, check_quantizable
from surgery.architectures.own_class import MODEL_TYPE, layer_entries, own_config
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from surgery.common.progress import Progress
from surgery.families import LATENT_FAMILIES, any_family_of
from surgery.model.quantized_cache import QuantizedKVLayer
from surgery.reporting.report import SourceShape
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import blocks_of
from surgery.running.skeleton import skeleton
from surgery.running.source import OwnSource, Source
from surgery.structures.base import LONG, Candidate, Forecast, Outcome, Structure, TargetOption, unchanged_tensors
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Demand
from surgery.structures.passing import source_attention
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.verification.written import measured_tokens


class Quantized(Structure[Source | OwnSource, QuantizedSettings]):
    """The attention stays unchanged, its cache is quantized."""

    supports_multimodal = takes_latents = True
    options = (TargetOption(place=2),)

    def __init__(self, opened: Source | OwnSource, settings: QuantizedSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self._config = own_config(opened.reader.config, layer_entries(opened.reader.config))
        skeleton({**self._config, "kv_cache": settings.kv_cache()}, opened.weight_dtype)  # refuses what cannot be

    @classmethod
    def open(cls, reader: CheckpointReader, settings: QuantizedSettings) -> Source | OwnSource:
        """A checkpoint of a family or of the custom model class, with a plain cache."""
        model_type = reader.config.get("model_type")
        own = model_type == MODEL_TYPE
        opened = OwnSource.open(reader, settings) if own else Source.of(reader, settings, any_family_of(reader.config))
        check_quantizable(reader.path, opened.config)
        return opened

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Plain caches of fewer bits; rotated keys of MLA stay."""
        latent = config["model_type"] in LATENT_FAMILIES
        settings = {"sinks": 4, **({"rope_bits": 16} if latent else {})}
        return [Candidate({"bits": bits, **settings}, scales=False) for bits in (8, 4, 3, 2)]

    def forecast(self) -> Forecast:
        """All of it: nothing is left to the work but measuring."""
        opened = self.opened
        kv_bytes = kv_bytes_of(self._config, opened.weight_dtype)(LONG) / LONG
        return Forecast(
            config=self._config,
            tensors=unchanged_tensors(opened.reader, opened.config),
            kv_bytes_per_token=kv_bytes,
            model_type=MODEL_TYPE,
            reasons=[REASON],
            demand=Demand(cached=round(kv_bytes / opened.layers / opened.weight_dtype.itemsize), quantizes=True),
        )

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Every tensor stays."""
        return unchanged_tensors(self.opened.reader, self.opened.config)

    def closed_form(self, work: ConversionContext, layer: int, cache: QuantizedKVLayer | None) -> nn.Module:
        """The source's attention over a quantized cache."""
        return source_attention(self.opened, layer, cache)

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Runs the source, which what is written has to equal before its cache is quantized."""
        opened, stream, held_out = self.opened, self.opened.stream, work.texts.held_out
        hidden = stream.embed(held_out.tokens)
        with work.progress.phase("source", opened.layers) as advance:
            for start, stop in blocks_of(opened.config):
                with stream.block(start, stop) as layers:
                    stream.run_layer(layers, hidden, self.settings.batch_size)
                advance(stop - start)
        tokens = measured_tokens(hidden.shape[1], opened.windows)
        bytes_per_token = kv_bytes_of(self._config, opened.weight_dtype)(tokens) / tokens
        return Outcome(
            config=self._config,
            target={
                "to": "quantized",
                "method": self.settings.format,
                "model_type": MODEL_TYPE,
                "reasons": [REASON],
            },
            layers=[],
            scores={"source": held_out.score(stream, hidden)},
            simulated=hidden,
            own_class=True,
            shape=SourceShape.of_config(opened.config, opened.weight_dtype, bytes_per_token),
        )
