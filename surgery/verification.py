"""Checks a written checkpoint by running it: the classes that will load it, layer by layer, against the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surgery.checkpoint import CheckpointReader
from surgery.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.held_out import HeldOut, Score, logit_difference
from surgery.layer_stream import LayerStream, StreamedLayer, single_layer_config
from surgery.progress import Progress

# Tokens of the first held-out sequence that are decoded one by one through a live cache, after a prompt.
PROMPT, STEPS = 24, 8

# Largest relative difference of logits that is taken for rounding, by the dtype of the written weights.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}
# Layers run in this precision or better, where decoding through the cache must agree with one forward pass.
CACHE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05}


@dataclass(frozen=True)
class Verification:
    """What a written checkpoint did when it was loaded again.

    Attributes:
        score: loss and recall.
        logit_difference: largest relative difference of logits to the simulation.
        cache_difference: largest relative difference of a layer's output, decoded through its cache, to one forward.
        kv_bytes_per_token: measured on the live caches of all layers.
    """

    score: Score
    logit_difference: float
    cache_difference: float
    kv_bytes_per_token: float


def verify_by_running(
    path: Path,
    weight_dtype: torch.dtype,
    source_stream: LayerStream,
    simulated: Tensor,
    held_out: HeldOut,
    windows: tuple[int | None, ...],
    predicted_bytes: float,
    batch_size: int,
    progress: Progress,
) -> Verification:
    """Loads the checkpoint in ``path`` layer by layer and runs it.

    Args:
        weight_dtype: of the rewritten tensors; the KV bytes are those of a model that runs in it.
        source_stream: gives device and compute dtype, and the logits of the simulation.
        simulated: final hidden states [N, T, D] of the simulated conversion.
        windows: sliding window of every layer, or None.
        predicted_bytes: KV bytes per token that the live caches must hold.

    Raises:
        SurgeryError: a layer does not load, decoding differs from one forward pass, logits differ from the
            simulation by more than rounding, or the caches hold other bytes than predicted.
    """
    reader = CheckpointReader.open(path)
    config = load_config(path)
    _check_meta(config, reader)
    stream = LayerStream(reader, config, single_layer_config, device=source_stream.device, dtype=source_stream.dtype)
    hidden = stream.embed(held_out.tokens)
    worst, bytes_per_token = 0.0, 0.0
    with progress.phase("verify: reload and run", stream.num_layers) as advance:
        for index in range(stream.num_layers):
            with stream.layer(index) as layer:
                first = hidden[:1, : PROMPT + STEPS].to(stream.device, stream.dtype)
                difference, measured = _decode(layer, first, windows[index])
                # The cache holds what the layer computes in; a model in the weights' dtype holds that.
                bytes_per_token += measured * weight_dtype.itemsize / stream.dtype.itemsize
                worst = max(worst, difference)
                stream.run_layer(layer, hidden, batch_size)
            advance()
    difference = logit_difference(source_stream, simulated, stream, hidden)
    if not worst <= CACHE_TOLERANCE[stream.dtype]:
        raise SurgeryError(f"{path}: decoding through the cache differs from one forward pass by {worst:.1e}")
    if not difference <= TOLERANCE[weight_dtype] + CACHE_TOLERANCE[stream.dtype]:
        raise SurgeryError(f"{path}: logits of the written checkpoint differ from the simulation by {difference:.1e}")
    if bytes_per_token != predicted_bytes:
        raise SurgeryError(
            f"the live cache takes {bytes_per_token:g} bytes per token where {predicted_bytes:g} were predicted"
        )
    return Verification(held_out.score(stream, hidden), difference, worst, bytes_per_token)


def load_config(path: Path):
    """The transformers config of a folder; never runs code from it.

    Raises:
        SurgeryError: transformers refuses it.
    """
    from transformers import AutoConfig

    from surgery import model as own_model

    own_model.register()
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
        raise SurgeryError(f"{path}/config.json: {' '.join(str(error).split())[:300]}") from None


def _check_meta(config, reader: CheckpointReader) -> None:
    """Builds the whole model without memory and compares the tensors outside its layers; layers load one by one."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if ".layers." in name or name in tied:
            continue
        if name not in reader or reader.info(name).shape != tuple(tensor.shape):
            found = reader.info(name).shape if name in reader else "absent"
            raise SurgeryError(f"{reader.path}: {name} is {found}, {type(model).__name__} wants {tuple(tensor.shape)}")


@torch.no_grad()
def _decode(layer: StreamedLayer, hidden: Tensor, window: int | None) -> tuple[float, float]:
    """Relative difference of cached to uncached outputs, and bytes per token that the live cache grew by."""
    from transformers import DynamicCache

    prompt = min(PROMPT, hidden.shape[1] - 1)
    if window:
        # Bytes per token are those of a window that still fills.
        prompt = max(1, min(prompt, window - 1 - STEPS))
        hidden = hidden[:, : prompt + STEPS]
    cache = DynamicCache(config=layer.config)
    want = layer(hidden)
    first = layer.decode(hidden[:, :prompt], prompt, cache)
    before = cache_bytes(cache)
    rest = layer.decode(hidden[:, prompt:], 0, cache)
    got = torch.cat([first, rest], dim=1)
    growth = (cache_bytes(cache) - before) / (hidden.shape[1] - prompt)
    return float((got - want).abs().max() / want.abs().max()), growth
