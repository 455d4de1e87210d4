"""A healed checkpoint is held to what its conversion was held to: same form, same bytes, and caches that compute."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from surgery.architectures.own_class import MODEL_TYPE
from surgery.calibration.held_out import HeldOut
from surgery.calibration.settings import ConversionSettings
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.running.layer_stream import blocks_of
from surgery.running.source import open_any
from surgery.training.settings import HealSettings
from surgery.verification.caches import run_through_cache
from surgery.verification.probe import Probe
from surgery.verification.record import kv_bytes_by_tokens
from surgery.verification.written import verify_by_running

SEQUENCES, LENGTH = 2, 64
QUANTIZED_PIECE = 8


def verify_healed(
    healed: CheckpointReader, student: CheckpointReader, settings: HealSettings, progress: Progress
) -> tuple[dict[str, Any], Probe]:
    """Runs a healed checkpoint layer by layer, through its caches and without.

    Returns:
        What the report says: largest difference of decoding to one pass, KV bytes a token at how many tokens. And a
        short text with what the healed model makes of it.

    Raises:
        SurgeryError: it has other tensors or another config than the student, does not decode what one pass computes,
            or its caches hold other bytes.
    """
    _check_form(healed, student)
    device = "cpu" if settings.device == "cpu" else "auto"
    wanted = ConversionSettings(calibration="none", device=device, batch_size=SEQUENCES)
    opened = open_any(healed, wanted)
    held_out = HeldOut.random(opened.config.vocab_size, SEQUENCES, LENGTH, settings.seed)
    own, quantized = healed.config["model_type"] == MODEL_TYPE, bool(healed.config.get("kv_cache"))
    blocks = blocks_of(opened.config) if own else None
    hidden = opened.stream.embed(held_out.tokens)
    piece, stream = QUANTIZED_PIECE if quantized else None, opened.stream
    for start, stop in blocks or [(layer, layer + 1) for layer in range(opened.layers)]:
        with stream.block(start, stop) as layers:
            if piece is None:
                stream.run_layer(layers, hidden, SEQUENCES)
            else:
                run_through_cache(stream, layers, hidden, SEQUENCES, piece, DynamicCache)
    verification = verify_by_running(
        healed.path,
        opened.weight_dtype,
        stream,
        hidden,
        held_out,
        opened.windows,
        kv_bytes_by_tokens(student, opened),
        SEQUENCES,
        progress,
        piece=piece,
        blocks=blocks,
    )
    said = {
        "cached_decode_difference": verification.cache_difference,
        "kv_bytes_per_token": verification.kv_bytes_per_token,
        "kv_tokens": verification.kv_tokens,
    }
    return said, verification.probe


def _check_form(healed: CheckpointReader, student: CheckpointReader) -> None:
    """Raises SurgeryError where the healed checkpoint is not of the student's form: stock must stay stock."""
    shapes = [
        {name: (reader.info(name).shape, reader.info(name).dtype) for name in reader.names()}
        for reader in (healed, student)
    ]
    if different := sorted(name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name)):
        raise SurgeryError(f"{healed.path}: {different[0]} is not as in the checkpoint that was healed")
    for name in ("model_type", "architectures", "attention_layers", "kv_cache"):
        if healed.config.get(name) != student.config.get(name):
            raise SurgeryError(f"{healed.path}: {name} of its config is not that of the checkpoint that was healed")
