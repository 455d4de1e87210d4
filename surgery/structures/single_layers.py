"""Loss of converting a single layer, measured for every layer in one pass over the model."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from surgery.running.layer_stream import LayerStream, StreamedLayer
from surgery.running.overflow import check_hidden

TOKENS_AT_ONCE = 256
"""Number of tokens whose logits of a slice of the vocabulary are in memory at once."""


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

    One pass over the vocabulary in slices, with the source's softmax accumulated online, as in FlashAttention
    (arXiv:2205.14135).
    """
    shape = 1 + len(others), len(source)
    logarithms = torch.full(shape, -torch.inf, dtype=torch.float64, device=stream.device)
    normalizer, normalizers = logarithms[0], logarithms[1:]
    differences = torch.zeros(len(others), len(source), dtype=torch.float64, device=stream.device)
    for _, weight in stream.output_slices():
        for rows in torch.arange(len(source), device=stream.device).split(TOKENS_AT_ONCE):
            logits, before = stream.slice_logits(source[rows], weight).float(), normalizer[rows]
            normalizer[rows] = before.logaddexp(logits.logsumexp(-1).double())
            probabilities = (logits - normalizer[rows, None]).exp().float()
            differences[:, rows] *= (before - normalizer[rows]).exp()
            for index, other in enumerate(others):
                converted = stream.slice_logits(other[rows], weight).float()
                normalizers[index, rows] = normalizers[index, rows].logaddexp(converted.logsumexp(-1).double())
                differences[index, rows] += (probabilities * (logits - converted)).sum(-1)
    divergences = (differences - normalizer + normalizers).mean(-1)
    check_hidden(divergences, stream.reader, "logits")
    return divergences.tolist()
