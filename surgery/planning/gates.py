"""Gates between candidates, layer by layer, whose gradients say on a live model what each option of each layer costs.

A gated layer computes all its options and adds up what they put out, weighted: a choice among operations made soft, as
in DARTS (Liu, Simonyan, Yang, arXiv:1806.09055). Over ratios of one structure, whose latents are ordered and nested,
that is a soft cut through them; over hybrids it is a gate on heads, as DuoAttention's (Xiao et al., arXiv:2410.10819).
Errors of rounding cancel in a mean of options, and in no option alone. So every token draws weights that are nearly
those of one option, by Gumbel noise (SNAS, Xie et al., arXiv:1812.09926): tokens then lose on average what the options
that they drew lose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.utils.checkpoint import checkpoint

from surgery.running.layer_stream import LayerStream, StreamedLayer

ROWS_AT_ONCE = 256
"""Tokens whose logits are in memory together."""
SHARPNESS = 0.3
"""Temperature of the weights that tokens draw: the lower, the nearer to one option, and the noisier are gradients. On
the demo model costs by these correlated by 0.98 with what exchanges of single layers cost, at 0.1 by 0.96."""
MOST = 1e12
"""Price of a size, at which the least is as good as certain."""


class GatedAttention(nn.Module):
    """Stands in for a transformers attention module and computes a weighted sum of options; prompts only.

    Attributes:
        weights: of every option at every token, [B, T, K]: set before every call.
    """

    def __init__(self, options: Sequence[nn.Module]):
        super().__init__()
        self.options = nn.ModuleList(options)
        self.weights: Tensor | None = None

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        found = (option(hidden_states, **kwargs)[0] for option in self.options)
        return sum(weight * out for weight, out in zip(self.weights.split(1, dim=-1), found, strict=True)), None


def within(scores: Tensor, sizes: Tensor, budget: float) -> Tensor:
    """Log-probabilities [L, K] of options whose expected size is at most the budget.

    Scores are lowered by a price of size, the same in all layers: the least at which the budget is kept, by bisection.

    Args:
        scores, sizes: [L, K]; the least sizes of all layers keep to the budget.
    """

    def priced(price: float) -> Tensor:
        return (scores - price * sizes).log_softmax(-1)

    def expected(price: float) -> float:
        return float((priced(price).exp() * sizes).sum())

    if expected(0.0) <= budget:
        return priced(0.0)
    low, high = 0.0, 1.0
    while expected(high) > budget and high < MOST:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if expected(middle) <= budget else (middle, high)
    return priced(high)


class GatedModel:
    """A source whose layers are gated; all of them are in memory, and of a pass what enters each.

    Args:
        layers: of the source, loaded.
        attentions: of every layer; None where it stays as it is.
    """

    def __init__(
        self, stream: LayerStream, layers: Sequence[StreamedLayer], attentions: Sequence[GatedAttention | None]
    ):
        self._stream, self._layers, self._attentions = stream, layers, attentions
        self._output = [weight for _, weight in stream.output_slices()]

    def gradients(self, tokens: Tensor, chances: Tensor, generator: torch.Generator) -> Tensor:
        """Of the mean divergence (KL) from the source on tokens [B, T], in nats, by the log-probabilities of options.

        Args:
            chances: these log-probabilities [L, K], of gated layers in order.

        Returns:
            [L, K]: of every option its probability times what it costs over the layer's mean.
        """
        leaf = chances.detach().requires_grad_()
        hidden, gated = self._stream.embed(tokens), self._drawn(tokens, leaf, generator)
        with torch.no_grad():
            wanted = hidden
            for layer in self._layers:
                wanted = layer(wanted)
        for layer, attention in zip(self._layers, self._attentions, strict=True):
            if attention is not None:
                attention.weights = next(gated)
            hidden = checkpoint(layer, hidden, attention, use_reentrant=False, preserve_rng_state=False)
        hidden.backward(self._upstream(hidden, wanted))
        return leaf.grad

    def _drawn(self, tokens: Tensor, chances: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        """Weights [B, T, K] of every gated layer."""
        stream = self._stream
        for of_layer in chances:
            uniform = torch.rand(*tokens.shape, len(of_layer), generator=generator).clamp_min(1e-20)
            noise = -(-uniform.log()).log()
            weights = ((of_layer + noise.to(of_layer)) / SHARPNESS).softmax(-1)
            yield weights.to(stream.device, stream.dtype)

    def _upstream(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        """The divergence's gradient at final hidden states [B, T, D], of what they predict from what others do."""
        leaf = hidden.detach().requires_grad_()
        count = leaf.shape[0] * leaf.shape[1]
        for found, target in zip(*(each.flatten(0, 1).split(ROWS_AT_ONCE) for each in (leaf, wanted)), strict=True):
            with torch.no_grad():
                target = self._predicted(target)
            (kl_div(self._predicted(found), target, log_target=True, reduction="sum") / count).backward()
        return leaf.grad

    def _predicted(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [n, V] of final hidden states [n, D] before the norm."""
        stream = self._stream
        normed = stream.final_norm(hidden)
        logits = torch.cat([stream.slice_logits(normed, weight) for weight in self._output], dim=-1)
        return logits.float().log_softmax(-1)
