"""Verification of a written checkpoint: its model classes run layer by layer, compared with the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut, Score, logit_difference
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.tensor_bytes import plain_tensors, storage_bytes
from surgery.families.base import keeps_state
from surgery.model.cache_argument import CACHE
from surgery.model.parts import entries_of
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.layer_stream import LayerStream, StreamedLayer, blocks_of, single_layer_config
from surgery.running.loading import load_config
from surgery.running.overflow import check_hidden
from surgery.running.source import OwnSource, Source
from surgery.running.unfused import open_model
from surgery.verification.probe import compute_probe

# Tokens of the prompt, and of the decode steps after it, through a live cache. The prompt is long enough to fill
# windows and token groups of caches; of a shorter text all tokens are used.
PROMPT, STEPS = 1000, 8

# Largest relative difference of logits that counts as rounding, by the dtype of the written weights.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}
# Largest relative difference between decoding through the cache and one forward pass, by the dtype of the run.
CACHE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05}
# With a quantized cache, rounding can move a value across the edge of a quantization step.
QUANTIZED_TOLERANCE = 0.05


@dataclass(frozen=True)
class Verification:
    """Measurements of a written checkpoint after reloading.

    Attributes:
        logit_difference: largest relative difference of logits from the simulation.
        cache_difference: largest relative difference of a layer's output between decoding through its cache and one
            forward pass; for a quantized cache, between decoding after the prompt in one and in two pieces; or None.
        kv_bytes_per_token: measured bytes of the live caches over `kv_tokens`.
        probe: a few logits for the report (:mod:`surgery.verification.probe`).
    """

    score: Score
    logit_difference: float
    cache_difference: float | None
    kv_tokens: int
    kv_bytes_per_token: float
    probe: dict[str, Any]


def verify_by_running(
    path: Path,
    opened: Source | OwnSource,
    simulated: Tensor,
    held_out: HeldOut,
    batch_size: int,
    progress: Progress,
    *,
    piece: int | None = None,
) -> Verification:
    """Load the checkpoint in ``path`` layer by layer, run it, and compare it with the simulation.

    Args:
        opened: the source, which determines device, dtypes, sliding windows, and the LM head for simulated logits.
        simulated: final hidden states [N, T, D] of the simulated conversion.
        piece: tokens per forward pass through the live cache; None for one pass over the held-out text.

    Raises SurgeryError: a layer does not load, decoding differs from one forward pass, logits differ from the
    simulation by more than rounding, or KV bytes differ from the prediction.
    """
    reader = open_model(path)
    config = load_config(reader.path)
    source, weight_dtype = opened.stream, opened.weight_dtype
    stream = LayerStream(reader, config, single_layer_config, device=source.device, dtype=source.dtype)
    hidden = stream.embed(held_out.tokens)
    tokens = measured_tokens(hidden.shape[1], opened.windows)
    differences, measured = [], 0
    quantized = rounds = any(entry.quantizes for entry in entries_of(config))
    with progress.phase("verify: reload and run", stream.num_layers) as advance:
        for start, stop in blocks_of(config):
            with stream.block(start, stop) as layer:
                if not keeps_state(config, start):  # a recurrent state is unchanged, and its bytes are constant
                    cache = _new_cache(layer)
                    text = hidden[:1, :tokens].to(stream.device, stream.dtype)
                    difference = _decode(layer, text, cache)
                    measured += _bytes_in(weight_dtype, cache, stream.dtype)
                    quantized = quantized or _reads_ahead(cache)
                    if difference is not None:
                        differences.append(difference)
                if piece is None:
                    stream.run_layer(layer, hidden, batch_size)
                else:
                    run_through_cache(stream, layer, hidden, batch_size, piece, lambda layer=layer: _new_cache(layer))
            advance(stop - start)
    difference = logit_difference(source, simulated, stream, hidden)
    allowed = QUANTIZED_TOLERANCE if quantized else CACHE_TOLERANCE[stream.dtype]
    for worst in differences:
        if not worst <= allowed:  # also true for NaN
            raise SurgeryError.at(path, f"decoding through the cache differs from one forward pass by {worst:.1e}")
    rounding = QUANTIZED_TOLERANCE if rounds else CACHE_TOLERANCE[stream.dtype]
    if not difference <= TOLERANCE[weight_dtype] + rounding:
        raise SurgeryError.at(path, f"logits of the written checkpoint differ from the simulation by {difference:.1e}")
    predicted = kv_bytes_of(reader.config, weight_dtype)(tokens)
    if measured != predicted:
        raise SurgeryError(f"the live cache takes {measured} bytes at {tokens} tokens, predicted {predicted}")
    worst = max(differences, default=None)
    score, probe = held_out.score(stream, hidden), compute_probe(stream, held_out.tokens[0], hidden[0], piece)
    return Verification(score, difference, worst, tokens, measured / tokens, probe)


def measured_tokens(length: int, windows: Sequence[int | None]) -> int:
    """Return the number of tokens after which live caches are measured; below every layer's sliding window."""
    return max(1, min(PROMPT + STEPS, length, *(window - 1 for window in windows if window)))


@torch.no_grad()
def run_through_cache(
    stream: LayerStream,
    layer: StreamedLayer,
    hidden: Tensor,
    batch_size: int,
    piece: int,
    new_cache: Callable[[], object],
) -> Tensor:
    """Run a layer on hidden states [N, T, D] in place, ``piece`` tokens at a time through caches of ``new_cache()``.

    Since every layer gets the same pieces, this equals the whole model reading ``piece`` tokens at a time.
    """
    for rows in hidden.split(batch_size):
        cache = new_cache()
        for part in rows.split(piece, dim=1):
            inputs = part.to(stream.device, stream.dtype)
            part.copy_(layer.model(inputs_embeds=inputs, use_cache=True, **{CACHE: cache}).last_hidden_state)
        check_hidden(rows, stream.reader, "hidden states")
    return hidden


@torch.no_grad()
def _decode(layer: StreamedLayer, hidden: Tensor, cache) -> float | None:
    """Decode [1, T, D] through the cache and return the largest relative difference from a reference; see
    `Verification.cache_difference`."""
    prompt = prompt_of(hidden.shape[1])
    decoded = layer.decode(hidden, prompt, cache)
    if _reads_ahead(cache):
        # The pass that completes a group of tokens reads it quantized, so one forward pass differs from decoding. The
        # cache contents of the first layer do not depend on how the prompt is split; those of a second layer do.
        if len(cache.layers) > 1:
            return None
        half = prompt // 2
        other = _new_cache(layer)
        parts = ((hidden[:, :half], half), (hidden[:, half:], prompt - half))
        again = [layer.decode(part, first, other) for part, first in parts if part.shape[1]]
        decoded, want = decoded[:, prompt:], torch.cat(again, dim=1)[:, prompt:]
    else:
        want = layer(hidden)
    return float((decoded - want).abs().max() / want.abs().max()) if want.numel() else 0.0


def prompt_of(tokens: int) -> int:
    """Return the number of prompt tokens among the measured tokens."""
    return max(1, tokens - STEPS)


def _new_cache(layer: StreamedLayer):
    """Create an empty cache like ``generate``; the layer adds its own cache layers."""
    from transformers import DynamicCache

    return DynamicCache(config=layer.config)


def _reads_ahead(cache) -> bool:
    # A cache layer with full-precision tokens holds its latents in a nested cache layer.
    parts = [*cache.layers, *(getattr(layer, "latents", None) for layer in cache.layers)]
    return any(getattr(layer, "reads_ahead", False) for layer in parts)


def _bytes_in(weight_dtype: torch.dtype, cache, dtype: torch.dtype) -> int:
    """Count the bytes of a live cache as if the model ran in ``weight_dtype`` instead of ``dtype``."""
    tensors = [tensor for tensor in plain_tensors(cache) if tensor.ndim > 0 or tensor.is_floating_point()]
    numbers = storage_bytes(tensor for tensor in tensors if tensor.dtype == dtype)
    codes = storage_bytes(tensor for tensor in tensors if tensor.dtype != dtype)
    return numbers // dtype.itemsize * weight_dtype.itemsize + codes
