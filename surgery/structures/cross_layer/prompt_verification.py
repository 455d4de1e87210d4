"""How a cross-layer conversion to bases of each prompt's own is verified.

The tensors are the source's, and a pass over a whole text reads it exactly. What the basis costs shows only in tokens
that come after a prompt, so these are decoded and compared with the exact pass; no bound is put on the difference.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import DynamicCache

from surgery.calibration.held_out import HeldOut, logit_difference
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.kv_cache import cache_bytes
from surgery.running.layer_stream import LayerStream, blocks_of, single_layer_config
from surgery.running.loading import load_config
from surgery.running.source import Source
from surgery.structures.base import Outcome
from surgery.verification.written import PROMPT, STEPS, TOLERANCE, Verification, prompt_of


@torch.no_grad()
def verify_prompt_basis(
    path: Path,
    outcome: Outcome,
    opened: Source,
    held_out: HeldOut,
    batch_size: int,
    progress: Progress,
) -> Verification:
    """Runs a checkpoint with a basis of each prompt's own.

    Raises:
        SurgeryError: one pass does not compute what the source does, or the live caches hold other bytes than
            predicted.
    """
    config, source, dtype = load_config(path), opened.stream, opened.weight_dtype
    stream = LayerStream(
        CheckpointReader.open(path), config, single_layer_config, device=source.device, dtype=source.dtype
    )
    hidden = stream.embed(held_out.tokens)
    tokens = min(PROMPT + STEPS, hidden.shape[1])
    worst, measured = 0.0, 0
    with progress.phase("verify: reload and run", stream.num_layers) as advance:
        for start, stop in blocks_of(config):
            with stream.block(start, stop) as layers:
                text = hidden[:1, :tokens].to(stream.device, stream.dtype)
                cache = DynamicCache(config=layers.config)
                decoded, exact = layers.decode(text, prompt_of(tokens), cache), layers(text)
                worst = max(worst, float((decoded - exact).abs().max() / exact.abs().max()))
                measured += cache_bytes(cache) // stream.dtype.itemsize * dtype.itemsize
                stream.run_layer(layers, hidden, batch_size)
            advance(stop - start)
    difference = logit_difference(source, outcome.simulated, stream, hidden)
    if not difference <= TOLERANCE[dtype]:
        raise SurgeryError(f"{path}: a pass over a whole text differs from the source's by {difference:.1e} of a logit")
    if measured != outcome.kv_bytes(tokens):
        raise SurgeryError(
            f"the live caches hold {measured} bytes after {tokens} tokens, {outcome.kv_bytes(tokens)} were predicted"
        )
    return Verification(held_out.score(stream, hidden), difference, worst, tokens, measured / tokens)
