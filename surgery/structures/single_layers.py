"""Loss of converting a single layer, measured for every layer in one pass over the model."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from surgery.running.layer_stream import LayerStream, StreamedLayer

TOKENS_AT_ONCE = 256
"""Number of tokens whose logits are in memory at once."""


@torch.no_grad()
def single_layer_divergences(
    stream: LayerStream,
    tokens: Tensor,
    layers: Collection[int],
    attention_of: Callable[[int, StreamedLayer], nn.Module],
    batch_size: int,
    advance: Callable[[], None],
) -> dict[int, float]:
    """Measure the KL divergence from the source, in nats per token, of models with a single converted layer.

    The hidden states of all these models advance together, so every layer is loaded once. Memory is one set of hidden
    states per converted layer; with L layers, time is about L / 2 passes over the tokens.

    Args:
        tokens: [N, T].
        layers: layers to convert, one per model.
        attention_of: returns a layer's converted attention.
        advance: called after each layer.
    """
    source, states = stream.embed(tokens), {}
    for index in range(stream.num_layers):
        with stream.layer(index) as layer:
            for hidden in states.values():
                stream.run_layer(layer, hidden, batch_size)
            if index in layers:
                states[index] = stream.run_layer(layer, source.clone(), batch_size, attention_of(index, layer))
            stream.run_layer(layer, source, batch_size)
        advance()
    divergences, count = dict.fromkeys(states, 0.0), tokens.numel()
    rows = source.flatten(0, 1).split(TOKENS_AT_ONCE)
    for piece, reference in enumerate(rows):
        log_probs = stream.logits(reference).float().log_softmax(-1)
        for index, hidden in states.items():
            converted = stream.logits(hidden.flatten(0, 1).split(TOKENS_AT_ONCE)[piece]).float().log_softmax(-1)
            divergences[index] += float((log_probs.exp() * (log_probs - converted)).sum(dtype=torch.float64)) / count
    return divergences
