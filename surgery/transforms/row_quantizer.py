"""Fitting of the means and steps of packed rows to calibration text.

:mod:`surgery.transforms.row_allocation` allocates the bits of a row (:mod:`surgery.model.token_format`). The first
tokens of a text stay in full precision and are left out of the fit.
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
"""Candidate steps, in units of 9 standard deviations divided by the levels of a channel."""
FIT_TOKENS = 8192
"""Number of calibration tokens, evenly spread, to which steps are fitted."""

Read = Callable[[Tensor], Tensor]
"""Function from values [B, T, channels] of a text, from its start, to the values that the cache returns."""


def centered(statistics: LayerStatistics) -> LayerStatistics:
    """Center the weighted moment of the statistics, since the means of a quantizer need no bits."""
    if (mean := statistics.weighted_mean) is None:  # no gradient reaches the layer
        return statistics
    moment = statistics.weighted_moment - torch.outer(mean, mean)
    return replace(statistics, weighted_moment=moment, weighted_mean=torch.zeros_like(mean))


def fit_indices(tokens: int) -> Tensor:
    """Return the indices of the tokens to which steps are fitted, evenly spread."""
    return torch.linspace(0, tokens - 1, min(FIT_TOKENS, tokens)).long()


def fitted_quantizer(
    runs: Runs,
    values: Tensor,
    weight: Tensor | None,
    unpaired: int | None = None,
    correction: Tensor | None = None,
) -> tuple[TokenQuantizer, float]:
    """Fit a quantizer to values [T, channels] of weighted tokens; return it and the share of values that it clips.

    Args:
        weight: weights [T] of the tokens; None for equal weights.
        unpaired: number of channels before the first rotary pair, whose two channels share a step; None: no pairs.
        correction: correction of the first channels by the others [first, others], or None.
    """
    quantizer, values = TokenQuantizer(TokenFormat(runs), 0 if correction is None else len(correction)), values.cpu()
    weight = torch.ones(len(values)) if weight is None else weight
    unpaired = values.shape[-1] if unpaired is None else unpaired
    fit_steps(quantizer, values, weight, unpaired)
    if correction is not None:
        quantizer.correction = correction.to("cpu", torch.float32)
        fit_steps(quantizer, values, weight, unpaired)  # the corrected channels, given the steps of the others
    return quantizer, float(quantizer.clipped(values).double().mean())


def fit_steps(quantizer: TokenQuantizer, values: Tensor, weight: Tensor, rank: int) -> None:
    """Set the quantizer's means and steps to the least weighted squared error on values [T, n].

    From channel ``rank`` on, neighboring channels are the real and imaginary part of a component and share a step.
    """
    values = quantizer.corrected(values)
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
        error = ((quantizer.rounded(values) - values).square() * share).sum(0)
        error[rank:] = error[rank:].view(-1, 2).sum(-1).repeat_interleave(2)
        steps = torch.where(error < best, quantizer.step, steps)
        best = torch.minimum(error, best)
    quantizer.step = steps


def reader(quantizer: TokenQuantizer, first: int, order: Tensor | None = None) -> Read:
    """Return a function that simulates a cache with the first tokens in full precision and the rest quantized.

    Args:
        order: index in the values [B, T, channels] of each channel of a row; None for equal orders.
    """
    back = None if order is None else order.argsort()

    def read(values: Tensor) -> Tensor:
        body = values[:, first:]
        decoded = quantizer.to(values.device).read(body if order is None else body[..., order])
        return torch.cat([values[:, :first], decoded if order is None else decoded[..., back]], dim=1)

    return read


def take_or_zero(tensor: Tensor, indices: Tensor, dim: int = -1) -> Tensor:
    """Select the entries at ``indices`` along a dimension, with zeros for indices beyond its end."""
    shape = list(tensor.shape)
    shape[dim] = 1
    padded = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return padded.index_select(dim, indices.clamp(max=tensor.shape[dim]))
