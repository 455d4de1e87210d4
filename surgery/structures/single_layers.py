"""Loss of converting a single layer, measured for every layer in one pass over the model."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from surgery.running.layer_stream import LayerStream, StreamedLayer
from surgery.running.overflow import check_hidden

TOKENS_AT_ONCE = 256
"""Number of tokens whose logits of a slice of the vocabulary are in memory at once."""
LARGEST_CHANGE = 80.0
"""Largest change of a logit whose exponential is finite in fp32, rounded down; larger ones count as this."""


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

    def normalized(hidden: Tensor) -> Tensor:
        return stream.final_norm(hidden.to(stream.device, stream.dtype)).flatten(0, 1)

    indices = list(states)
    divergences = _divergences(stream, normalized(source), [normalized(states.pop(index)) for index in indices])
    return dict(zip(indices, divergences, strict=True))


def _divergences(stream: LayerStream, source: Tensor, others: list[Tensor]) -> list[float]:
    """Compute the mean KL divergence of normalized final states from the source's, all [T, D].

    With the change e of the logits it is log E[exp e] - E[e] under the source's softmax, so that small divergences are
    not differences of large numbers. One pass over the vocabulary in slices, with the softmax accumulated online, as in
    FlashAttention (arXiv:2205.14135).
    """
    normalizer = torch.full((len(source),), -torch.inf, dtype=torch.float64, device=stream.device)
    # E[e] and E[exp e - 1] of every model and token.
    means, growths = torch.zeros(2, len(others), len(source), dtype=torch.float64, device=stream.device)
    for _, weight in stream.output_slices():
        for rows in torch.arange(len(source), device=stream.device).split(TOKENS_AT_ONCE):
            logits, before = stream.slice_logits(source[rows], weight).float(), normalizer[rows]
            normalizer[rows] = before.logaddexp(logits.logsumexp(-1).double())
            probabilities = (logits - normalizer[rows, None]).exp().float()
            for sums in (means, growths):
                sums[:, rows] *= (before - normalizer[rows]).exp()
            for index, other in enumerate(others):
                change = stream.slice_logits(other[rows], weight).float() - logits
                means[index, rows] += (probabilities * change).sum(-1)
                growths[index, rows] += (probabilities * change.clamp(max=LARGEST_CHANGE).expm1()).sum(-1)
    divergences = (growths.log1p() - means).mean(-1).clamp(min=0)
    check_hidden(divergences, stream.reader, "logits")
    return divergences.tolist()
