"""Loss of a model of which one layer alone is converted, for every layer, in one pass over the layers."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from surgery.running.layer_stream import LayerStream, StreamedLayer

TOKENS_AT_ONCE = 256
"""Tokens whose logits are in memory at once."""


@torch.no_grad()
def single_layer_divergences(
    stream: LayerStream,
    tokens: Tensor,
    layers: Collection[int],
    attention_of: Callable[[int, StreamedLayer], nn.Module],
    batch_size: int,
    advance: Callable[[], None],
) -> dict[int, float]:
    """KL divergence from the source, in nats per token, of models of which one layer each is converted.

    All of them are carried along, so that every layer is loaded once: memory is one set of hidden states a layer, and
    time half of as many passes over the tokens as there are layers.

    Args:
        tokens: [N, T].
        layers: those that are converted.
        attention_of: a layer's converted attention.
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
    for place, reference in enumerate(rows):
        of_source = stream.logits(reference).float().log_softmax(-1)
        for index, hidden in states.items():
            converted = stream.logits(hidden.flatten(0, 1).split(TOKENS_AT_ONCE)[place]).float().log_softmax(-1)
            divergences[index] += float((of_source.exp() * (of_source - converted)).sum(dtype=torch.float64)) / count
    return divergences
