"""Verification of a written checkpoint without its source or simulation, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import DynamicCache

from surgery.calibration.held_out import HeldOut
from surgery.checkpoint import CheckpointReader
from surgery.common.progress import Progress
from surgery.running.layer_stream import LayerStream, blocks_of
from surgery.running.source import OwnSource, Source, open_any
from surgery.verification.written import Verification, run_through_cache, verify_by_running

SEQUENCES, LENGTH = 2, 64
QUANTIZED_PIECE = 8


def verify_again(reader: CheckpointReader, opened: Source | OwnSource, seed: int, progress: Progress) -> Verification:
    """Run random tokens through a checkpoint's layers in one pass, and decode them through its caches.

    Raises SurgeryError: a layer does not load, decoding differs from one forward pass, or the caches hold other bytes
    than predicted from the config.
    """
    held_out = HeldOut.random(opened.config.vocab_size, SEQUENCES, LENGTH, seed)
    piece = QUANTIZED_PIECE if reader.config.get("kv_cache") else None
    return verify_by_running(
        reader.source,
        opened,
        run_layers(opened.stream, held_out.tokens, piece),
        held_out,
        SEQUENCES,
        progress,
        piece=piece,
    )


def run_layers(stream: LayerStream, tokens: Tensor, piece: int | None) -> Tensor:
    """Compute the last layer's outputs [N, T, D] for tokens [N, T], ``piece`` tokens at a time, or None in one pass."""
    hidden = stream.embed(tokens)
    for start, stop in blocks_of(stream.config):
        with stream.block(start, stop) as layers:
            if piece is None:
                stream.run_layer(layers, hidden, SEQUENCES)
            else:
                run_through_cache(stream, layers, hidden, SEQUENCES, piece, DynamicCache)
    return hidden


def open_written(reader: CheckpointReader, device: str) -> Source | OwnSource:
    """Open a checkpoint to run it in float32."""
    return open_any(reader, _Running(device))


@dataclass(frozen=True)
class _Running:
    device: str
    dtype: str = "float32"
