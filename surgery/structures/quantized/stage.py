"""The last stage of a conversion: its KV cache quantized, measured and verified through that cache.

``--to quantized`` is this stage alone. With ``bits`` any other conversion whose result can be quantized ends in it:
what was written stays unchanged, config.json gets ``kv_cache``, and the model is then run through its quantized cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from surgery.architectures.cached import REASON, check_quantizable, rotated_tensors
from surgery.architectures.multimodal import whole_config
from surgery.architectures.own_class import MODEL_TYPE, layer_entries, own_config, with_auto_map
from surgery.calibration.held_out import HeldOut, Score, logit_difference
from surgery.checkpoint import CheckpointWriter
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.model.parts import has_compact_layers
from surgery.model.quantized_cache import QuantizedKVLayer
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import LayerStream, blocks_of, single_layer_config
from surgery.running.loading import load_config
from surgery.running.skeleton import skeleton
from surgery.running.source import OwnSource
from surgery.running.unfused import open_model
from surgery.structures.settings import StructureSettings
from surgery.structures.stages import ERROR_SEQUENCES
from surgery.verification.flow import predicted_flow
from surgery.verification.written import CACHE_TOLERANCE, TOLERANCE, Verification, run_through_cache, verify_by_running

if TYPE_CHECKING:
    from surgery.structures.base import Outcome
    from surgery.structures.context import ConversionContext

PIECE = 8
"""Tokens at a time in which held-out text is read through the cache: near decoding, where it is one."""


@dataclass(frozen=True)
class QuantizedLayerReport:
    """One layer of the report, or adjacent ones that only run together.

    Attributes:
        layer: the first of them.
        keys_by: what shares a scale of keys, or of the latent in their place: channel or token; "exact" if neither.
        measured: difference of the output to that with an exact cache, relative to what the layer adds to its inputs,
            on the source's inputs.
    """

    layer: int
    keys_by: str
    measured: dict[str, float]

    @staticmethod
    def columns() -> tuple[str, ...]:
        """Heads of :meth:`cells`."""
        return ("keys share a scale by",)

    def cells(self) -> tuple:
        """Return the values of the row, for people."""
        return (self.keys_by,)


EXACT, QUANTIZED = "exact", "quantized"
"""Stages: what was written with an exact cache, and as it is."""

LOSSES_READ = f"through the cache, {PIECE} tokens at a time; the source's in one forward pass"
"""For the report."""


@dataclass(frozen=True)
class Measured:
    """The stages by name, final hidden states and scores; and a report of each layer, or block of them."""

    hidden: dict[str, Tensor]
    scores: dict[str, Score]
    layers: list[QuantizedLayerReport]


def measure_quantized(
    exact: OwnSource, path: Path, held_out: HeldOut, settings: StructureSettings, progress: Progress
) -> Measured:
    """Carries what was written through the model twice: with an exact cache, and through quantized ones.

    The caches are made by hand and given to a model that keeps exact ones, so that the written model, which makes its
    own, is compared with something else; unless it keeps a window besides, which only itself knows how to.
    """
    stream, reader = exact.stream, open_model(path)
    config = load_config(reader.path)
    new_layers = [config.quantized_layer(layer) for layer in range(exact.layers)]
    by_hand = not has_compact_layers(config)
    read_stream = stream
    if not by_hand:
        read_stream = LayerStream(reader, config, single_layer_config, device=stream.device, dtype=stream.dtype)
    embedded = stream.embed(held_out.tokens)
    hidden, layers, batch = {stage: embedded.clone() for stage in (EXACT, QUANTIZED)}, [], settings.batch_size
    with progress.phase("measure", exact.layers) as advance:
        for start, stop in blocks_of(config):

            def new_cache(start: int = start, stop: int = stop) -> Cache:
                if not by_hand:
                    return DynamicCache()
                caches = new_layers[start:stop]
                return Cache(layers=[QuantizedKVLayer(*each.settings()) if each else DynamicLayer() for each in caches])

            inputs = hidden[EXACT][:ERROR_SEQUENCES].clone()
            with read_stream.block(start, stop) as layer:
                read = run_through_cache(read_stream, layer, inputs.clone(), batch, PIECE, new_cache)
                run_through_cache(read_stream, layer, hidden[QUANTIZED], batch, PIECE, new_cache)
            with stream.block(start, stop) as layer:
                stream.run_layer(layer, hidden[EXACT], batch)
            want = hidden[EXACT][:ERROR_SEQUENCES]
            error = float((read - want).norm() / (want - inputs).norm())
            keys_by = new_layers[start].keys_by if new_layers[start] else "exact"
            layers.append(QuantizedLayerReport(start, keys_by, {QUANTIZED: error}))
            advance(stop - start)
    scores = {stage: held_out.score(stream, states) for stage, states in hidden.items()}
    return Measured(hidden, scores, layers)


def quantize_written(
    writer: CheckpointWriter, work: ConversionContext, outcome: Outcome
) -> tuple[Outcome, Verification]:
    """Quantize the cache of a checkpoint of the custom model class that is written and not yet committed.

    Nothing is written twice but config.json and, with ``hadamard``, the tensors that take the rotation. What was
    written is compared with the simulation before, as it computes with an exact cache.

    Args:
        writer: has everything but the report, with an exact cache in config.json.
        outcome: of the conversion so far.

    Returns:
        The outcome and the verification of the quantized model.

    Raises:
        SurgeryError: its cache cannot be quantized, or it computes something else than was simulated.
    """
    opened, settings, held_out, progress = work.opened, work.settings, work.texts.held_out, work.progress
    reader, dtype = open_model(writer.partial), opened.weight_dtype
    exact = OwnSource.open(reader, settings)
    check_quantizable(writer.out, exact.config)
    if settings.hadamard:
        for layer in work.layers("rotate"):
            for name, tensor in rotated_tensors(reader, exact.config, layer).items():
                writer.rewrite(name, tensor)
        exact = OwnSource.open(open_model(writer.partial), settings)
    config = with_auto_map({**outcome.config, "kv_cache": settings.kv_cache()})
    writer.write_json("config.json", whole_config(opened.reader, config))
    measured = measure_quantized(exact, writer.partial, held_out, settings, progress)
    difference = logit_difference(opened.stream, outcome.simulated, exact.stream, measured.hidden[EXACT])
    if not difference <= TOLERANCE[dtype] + CACHE_TOLERANCE[exact.stream.dtype]:
        raise SurgeryError.at(writer.out, f"logits as written differ from the simulation by {difference:.1e}")
    verification = verify_by_running(
        writer.partial,
        opened,
        measured.hidden[QUANTIZED],
        held_out,
        settings.batch_size,
        progress,
        piece=PIECE,
        flow=partial(predicted_flow, skeleton(config, opened.stream.dtype)),
    )
    for measured_layer in measured.layers:
        for report in outcome.layers:
            if report.layer == measured_layer.layer:
                report.measured.update(measured_layer.measured)
    at = verification.kv_tokens
    scores = {"hadamard": measured.scores[EXACT]} if settings.hadamard else {}
    outcome = replace(
        outcome,
        config=config,
        target={
            **outcome.target,
            **quantized_facts(settings),
            "numbers_bytes_per_token": kv_bytes_of(outcome.config, dtype)(at) / at,
        },
        layers=outcome.layers or measured.layers,
        scores={**outcome.scores, **scores, QUANTIZED: measured.scores[QUANTIZED]},
        simulated=measured.hidden[QUANTIZED],
    )
    return outcome, replace(verification, logit_difference=max(difference, verification.logit_difference))


def in_own_class(outcome: Outcome) -> Outcome:
    """Return the same result in the custom model class, which alone keeps a quantized cache."""
    target = outcome.target
    if target["model_type"] != MODEL_TYPE:
        target = {**target, "model_type": MODEL_TYPE, "reasons": [REASON]}
    config = own_config(outcome.config, layer_entries(outcome.config))
    return replace(outcome, config=config, target=target, own_class=True)


def quantized_facts(settings: StructureSettings) -> dict:
    """Return the facts of a quantized cache for a report's target."""
    return {"kv_cache": settings.kv_cache(), "hadamard": settings.hadamard, "losses_read": LOSSES_READ}
