"""``surgery convert --to quantized``: a checkpoint whose KV cache keeps codes of a few bits.

Nothing is fitted. The result is the project's own class with the attention of the source, whichever that is, and
``kv_cache`` in its config; every tensor but those that a Hadamard rotation is folded into is copied byte for byte. What
was written is measured through its cache, a few tokens at a time, since one forward pass over a text reads recent
tokens quantised that decoding still has exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from surgery.architectures.cached import check_quantizable, rotated_names, rotated_tensors
from surgery.architectures.own_class import ENGINES, MODEL_TYPE, layer_entries, own_config
from surgery.checkpoint import CheckpointReader, CheckpointWriter
from surgery.conversion import Conversion, Outcome, conclude, settle_output, unchanged_tensors, write_rest
from surgery.errors import SurgeryError
from surgery.flow_verification import predicted_flow
from surgery.held_out import HeldOut, Score, logit_difference
from surgery.layer_stream import LayerStream, single_layer_config
from surgery.model import remote_code_files
from surgery.model.quantized_cache import QuantizedKVLayer
from surgery.progress import Progress
from surgery.report import SourceShape
from surgery.settings import QuantizedSettings
from surgery.skeleton import skeleton
from surgery.source import OwnSource, Source
from surgery.texts import load_texts
from surgery.verification import TOLERANCE, blocks_of, load_config, run_through_cache, verify_by_running

PIECE = 8
"""Tokens at a time in which held-out text is read through the cache: near decoding, where it is one."""

ERROR_SEQUENCES = 2


@dataclass(frozen=True)
class QuantizedLayerReport:
    """One layer of the report, or adjacent ones that only run together.

    Attributes:
        layer: the first of them.
        keys_by: what shares a scale of keys, or of the latent in their place: channel or token.
        measured: difference of the output to that with an exact cache, relative to what the layer adds to its inputs,
            on the source's inputs.
    """

    layer: int
    keys_by: str
    measured: dict[str, float]


def convert_to_quantized(
    source: str | Path,
    out: str | Path | None = None,
    settings: QuantizedSettings | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Conversion:
    """Writes a checkpoint that keeps its KV cache quantised.

    Args:
        source: local folder or hub id: a checkpoint of a supported family, or of the project's own class.
        out: folder to write; the source's name with "-quantized" behind it by default.
        settings: default :class:`QuantizedSettings`.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        command: what the user typed, for the report.
        progress: bars; silent if None.

    Raises:
        SurgeryError: bad input or an impossible request; nothing is left behind.
    """
    settings, progress = settings or QuantizedSettings(), progress or Progress(silent=True)
    opened = open_checkpoint(source, settings, allow_pickle=allow_pickle)
    reader, dtype = opened.reader, opened.weight_dtype
    out = settle_output(source, reader.source, out, "quantized", overwrite=overwrite)
    config = own_config(reader.config, layer_entries(reader.config), kv_cache=settings.kv_cache())
    exact, quantized = (skeleton({**config, "kv_cache": kv_cache}, dtype) for kv_cache in (None, config["kv_cache"]))
    texts = load_texts(opened, settings, progress)

    rotated = rotated_names(reader, opened.config) if settings.hadamard else set()
    tensors = unchanged_tensors(reader, opened.config)
    tensors = {name: spec for name, spec in tensors.items() if "rotary_emb." not in name}  # the config's own
    with CheckpointWriter(out, tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite) as writer:
        if rotated:
            with progress.phase("rotate", opened.layers) as advance:
                for layer in range(opened.layers):
                    for name, tensor in rotated_tensors(reader, opened.config, layer).items():
                        writer.write(name, tensor)
                    advance()
        kept = [name for name in tensors if name not in rotated]
        write_rest(writer, tensors, reader, config, kept, progress, code=remote_code_files())
        measured = _measure(opened, writer.partial, texts.held_out, bool(rotated), dtype, settings, progress)
        verification = verify_by_running(
            writer.partial,
            dtype,
            opened.stream,
            measured.hidden["quantized"],
            texts.held_out,
            opened.windows,
            lambda tokens: quantized.kv_cache_bytes(1, tokens),
            settings.batch_size,
            progress,
            piece=PIECE,
            blocks=blocks_of(quantized.config),
            flow=partial(predicted_flow, skeleton(config, opened.stream.dtype)),
        )
        at = verification.kv_tokens
        outcome = Outcome(
            config=config,
            replaced=rotated,
            target={
                "to": "quantized",
                "method": settings.format,
                "model_type": MODEL_TYPE,
                "reasons": ["no stock class keeps a quantised cache by itself"],
                "kv_cache": config["kv_cache"],
                "hadamard": settings.hadamard,
                "losses_read": f"through the cache, {PIECE} tokens at a time; the source's in one forward pass",
                "engines": ENGINES,
            },
            kv_bytes=lambda tokens: quantized.kv_cache_bytes(1, tokens),
            layers=measured.layers,
            scores=measured.scores,
            simulated=measured.hidden["quantized"],
            shape=SourceShape.of_config(opened.config, dtype, exact.kv_cache_bytes(1, at) / at),
        )
        report = conclude(writer, opened, settings, texts, outcome, verification, command, progress)
    return Conversion(writer.out, report)


def open_checkpoint(source: str | Path, settings: QuantizedSettings, *, allow_pickle: bool) -> Source | OwnSource:
    """Opens a checkpoint whose cache can be quantised.

    Raises:
        SurgeryError: it cannot be read, or there is no class that could hold its quantised cache.
    """
    reader = CheckpointReader.open(source, allow_pickle=allow_pickle)
    model_type = reader.config.get("model_type")
    if model_type == "deepseek_v3":
        raise SurgeryError(
            f"{reader.path}: stock deepseek_v3 keeps a plain cache; convert its source again with --carrier own, which "
            "makes an MLA checkpoint that can be quantised"
        )
    if model_type != MODEL_TYPE:
        opened = Source.open(source, settings, allow_pickle=allow_pickle)
    else:
        opened = OwnSource.open(reader, settings)
    check_quantizable(reader.path, opened.config)
    return opened


@dataclass(frozen=True)
class _Measured:
    hidden: dict[str, Tensor]
    scores: dict[str, Score]
    layers: list[QuantizedLayerReport]


def _measure(
    opened: Source | OwnSource,
    written: Path,
    held_out: HeldOut,
    rotated: bool,
    dtype: torch.dtype,
    settings: QuantizedSettings,
    progress: Progress,
) -> _Measured:
    """Carries the stages through the model: the source, the rotated weights, and these through quantised caches.

    The caches are made by hand and given to a model that keeps exact ones, so that the written model, which makes its
    own, is compared with something else; unless it keeps a window besides, which only itself knows how to.

    Raises:
        SurgeryError: the rotated weights are another function than the source's.
    """
    source, config, reader = opened.stream, load_config(written), CheckpointReader.open(written)
    new_layers = [config.quantized_layer() for _ in config.attention_layers]
    stream, coded = (
        LayerStream(reader, streamed, single_layer_config, device=source.device, dtype=source.dtype)
        for streamed in (config, load_config(written))
    )
    config.kv_cache = None
    by_hand = not (config.exact_window or config.streams)
    coded = stream if by_hand else coded
    embedded = source.embed(held_out.tokens)
    stages = ("source", "rotated", "quantized") if rotated else ("source", "quantized")
    hidden, layers, batch = {stage: embedded.clone() for stage in stages}, [], settings.batch_size
    with progress.phase("measure", opened.layers) as advance:
        for start, stop in blocks_of(config):

            def new_cache(start: int = start, stop: int = stop) -> Cache:
                if not by_hand:
                    return DynamicCache()
                return Cache(layers=[QuantizedKVLayer(*layer.settings()) for layer in new_layers[start:stop]])

            inputs = hidden["source"][:ERROR_SEQUENCES].clone()
            with stream.block(start, stop) as layer:
                exact = stream.run_layer(layer, inputs.clone(), batch)
                if rotated:
                    stream.run_layer(layer, hidden["rotated"], batch)
            with coded.block(start, stop) as layer:
                read = run_through_cache(coded, layer, inputs.clone(), batch, PIECE, new_cache)
                error = float((read - exact).norm() / (exact - inputs).norm())
                run_through_cache(coded, layer, hidden["quantized"], batch, PIECE, new_cache)
            with source.block(start, stop) as layer:
                source.run_layer(layer, hidden["source"], batch)
            layers.append(QuantizedLayerReport(start, new_layers[start].keys_by, {"quantized": error}))
            advance(stop - start)
    if rotated:
        difference = logit_difference(source, hidden["source"], stream, hidden["rotated"])
        if not difference <= TOLERANCE[dtype]:
            raise SurgeryError(f"{opened.reader.path}: the rotation changes its logits by {difference:.1e}")
    scores = {stage: held_out.score(stream, states) for stage, states in hidden.items()}
    return _Measured(hidden, scores, layers)
