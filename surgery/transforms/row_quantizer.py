"""Means and steps of packed rows, fitted to calibration text.

A row (:mod:`surgery.model.token_format`) has its bits from :mod:`surgery.transforms.row_allocation`. The first tokens
of a text stay in full precision, so nothing here looks at them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics
from surgery.model.token_format import Runs, TokenFormat
from surgery.model.token_quantizer import TokenQuantizer

STEP_FACTORS = (0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 1.0, 1.15, 1.35, 1.6, 2.0)
"""Steps that are tried, in units of 9 standard deviations over the levels of a channel."""
FIT_TOKENS = 8192
"""Calibration tokens, evenly spread, that steps are fitted to."""

Read = Callable[[Tensor], Tensor]
"""Function from values [B, T, channels] of a text, from its start, to what a cache gives back of them."""


def centered(statistics: LayerStatistics) -> LayerStatistics:
    """Statistics whose moment is that of deviations from the mean: a quantizer's means cost no bits."""
    if (mean := statistics.weighted_mean) is None:  # no gradient reaches the layer
        return statistics
    moment = statistics.weighted_moment - torch.outer(mean, mean)
    return replace(statistics, weighted_moment=moment, weighted_mean=torch.zeros_like(mean))


def fit_places(tokens: int) -> Tensor:
    """Return the places, among so many tokens, of those that steps are fitted to."""
    return torch.linspace(0, tokens - 1, min(FIT_TOKENS, tokens)).long()


def fitted_quantizer(
    runs: Runs, values: Tensor, weight: Tensor | None, unpaired: int | None = None
) -> tuple[TokenQuantizer, float]:
    """Fit a quantizer to values [T, channels] of weighted tokens; return it, and the share of values that it clips.

    Args:
        weight: [T] of the tokens; None where all weigh the same.
        unpaired: channels before the first rotary pair, whose two neighbors share a step; all if None.
    """
    quantizer = TokenQuantizer(TokenFormat(runs))
    weight = torch.ones(len(values)) if weight is None else weight
    fit_steps(quantizer, values.cpu(), weight, values.shape[-1] if unpaired is None else unpaired)
    return quantizer, float(quantizer.clipped(values.cpu()).double().mean())


def fit_steps(quantizer: TokenQuantizer, values: Tensor, weight: Tensor, rank: int) -> None:
    """Sets means and steps to what leaves the least weighted squared error of values [T, n].

    Real and imaginary parts of a component, neighbors from channel ``rank`` on, share a step.
    """
    share = (weight.double() / weight.double().sum()).float()[:, None]
    mean = (values * share).sum(0)
    deviation = ((values - mean).square() * share).sum(0)
    deviation[rank:] = deviation[rank:].view(-1, 2).mean(-1).repeat_interleave(2)
    deviation = deviation.sqrt()
    quantizer.mean = mean
    best, steps = torch.full_like(mean, torch.inf), torch.ones_like(mean)
    for factor in STEP_FACTORS:
        step = (9 * factor * deviation / (quantizer.highest + 1)).clamp_min(1e-30)
        quantizer.step = torch.where(deviation > 0, step, 1.0)
        error = ((quantizer.read(values) - values).square() * share).sum(0)
        error[rank:] = error[rank:].view(-1, 2).sum(-1).repeat_interleave(2)
        steps = torch.where(error < best, quantizer.step, steps)
        best = torch.minimum(error, best)
    quantizer.step = steps


def reader(quantizer: TokenQuantizer, first: int, order: Tensor | None = None) -> Read:
    """Return what a cache that keeps the first tokens in full precision gives back of a text's values.

    Args:
        order: which of the values [B, T, channels] each channel of a row is; the same one if None.
    """
    back = None if order is None else order.argsort()

    def read(values: Tensor) -> Tensor:
        body = values[:, first:]
        decoded = quantizer.to(values.device).read(body if order is None else body[..., order])
        return torch.cat([values[:, :first], decoded if order is None else decoded[..., back]], dim=1)

    return read


def take_or_zero(tensor: Tensor, places: Tensor, dim: int = -1) -> Tensor:
    """Return what stands at some places of a dimension, zeros for places behind its end."""
    shape = list(tensor.shape)
    shape[dim] = 1
    padded = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return padded.index_select(dim, places.clamp(max=tensor.shape[dim]))
