"""Runs a written checkpoint on its own, layer by layer: no source and no simulation is needed for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers import DynamicCache

from surgery.calibration.held_out import HeldOut
from surgery.checkpoint import CheckpointReader
from surgery.common.progress import Progress
from surgery.model import SurgeryConfig
from surgery.model.blockwise_decoder import BlockwiseDecoder
from surgery.running.layer_stream import LayerStream, blocks_of
from surgery.running.skeleton import skeleton
from surgery.running.source import OwnSource, Source, open_any
from surgery.verification.written import Verification, prompt_of, run_through_cache, verify_by_running

SEQUENCES, LENGTH = 2, 64
QUANTIZED_PIECE = 8


def verify_again(reader: CheckpointReader, opened: Source | OwnSource, seed: int, progress: Progress) -> Verification:
    """Runs random tokens through a checkpoint's layers in one pass, and decodes them through its caches.

    Raises:
        SurgeryError: a layer does not load, decoding is not what one pass computes, or the caches hold other bytes than
            the config says.
    """
    held_out = HeldOut.random(opened.config.vocab_size, SEQUENCES, LENGTH, seed)
    piece = QUANTIZED_PIECE if reader.config.get("kv_cache") else None
    return verify_by_running(
        reader.source,
        opened,
        run_layers(opened.stream, held_out.tokens, piece),
        held_out,
        kv_bytes_of(reader, opened),
        SEQUENCES,
        progress,
        piece=piece,
    )


def run_layers(stream: LayerStream, tokens: Tensor, piece: int | None) -> Tensor:
    """What the last layer puts out [N, T, D], of tokens [N, T] read ``piece`` at a time, or all in one pass."""
    hidden = stream.embed(tokens)
    for start, stop in blocks_of(stream.config):
        with stream.block(start, stop) as layers:
            if piece is None:
                stream.run_layer(layers, hidden, SEQUENCES)
            else:
                run_through_cache(stream, layers, hidden, SEQUENCES, piece, DynamicCache)
    return hidden


def open_written(reader: CheckpointReader, device: str) -> Source | OwnSource:
    """A checkpoint as it is run here."""
    return open_any(reader, _Running(device))


@dataclass(frozen=True)
class _Running:
    """Where layers run, and in what."""

    device: str
    dtype: str = "float32"


def kv_bytes_of(reader: CheckpointReader, opened: Source | OwnSource) -> Callable[[int], int]:
    """KV bytes of one sequence by its tokens, of which the last few came one by one, as the config says.

    In the dtype of the weights.
    """
    if reader.config["model_type"] == SurgeryConfig.model_type:
        model = skeleton(reader.config, opened.weight_dtype)
        if isinstance(model.model, BlockwiseDecoder):  # where a basis may be of the prompt alone
            return lambda tokens: model.model.kv_cache_bytes(1, tokens, prompt=prompt_of(tokens))
        return lambda tokens: model.kv_cache_bytes(1, tokens)
    if isinstance(opened, Source):
        layers, width = opened.layers - len(opened.stateful), opened.first.kv_width
    else:
        layers, width = opened.layers, reader.config["kv_lora_rank"] + reader.config["qk_rope_head_dim"]
    return lambda tokens: width * layers * opened.weight_dtype.itemsize * tokens
