"""Low-rank layers with latents quantized to packed rows, bits allocated to each latent by its energy.

Let z be the bias-free keys and values of a token, z̄ and c̄ weighted means over calibration text without its first
tokens, and ĉ the decoded latents of earlier layers of the group:

    prediction   R = E[(z - z̄) (ĉ - c̄)ᵀ] E[(ĉ - c̄) (ĉ - c̄)ᵀ]⁻¹
    own latents  c = down (z - R ĉ), which the cache returns as Q(c)
    read         ẑ = R ĉ + up Q(c) + (1 - up down) (z̄ - R c̄)

with ``up down`` the best map of its rank in the metric of the loss. This is predictive coding in a closed loop (DPCM:
Jayant and Noll, Digital Coding of Waveforms, 6). Predictions start from the quantized latents of earlier layers, so
quantization noise does not accumulate. Means become biases and need no latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics
from surgery.families.anatomy import AttentionAnatomy
from surgery.model.token_format import Runs
from surgery.model.token_quantizer import TokenQuantizer
from surgery.running.moment_precision import MomentPrecision
from surgery.transforms.algebra import psd_powers
from surgery.transforms.low_rank import elements_of, key_scale, kv_rows, loss_metric
from surgery.transforms.low_rank_layer import Block, LowRankLayer
from surgery.transforms.low_rank_methods import BlockMoments, Factors, loss_weighted
from surgery.transforms.row_allocation import Section, unit_order
from surgery.transforms.row_quantizer import centered, fit_indices, fitted_quantizer, take_or_zero

FIRST_WEIGHT = 1.0
"""Weight of a first token in the choice of the latents, relative to other tokens. No other weight was tried."""


@dataclass(frozen=True)
class Unpredicted:
    """Residual z - R ĉ of a layer's bias-free keys, before their norm, and values, given earlier layers; float64.

    Attributes:
        elements: indices in z of each block's elements; the blocks' ranks are not set yet.
        factors: factors of each block's part of z - z̄ - R (ĉ - c̄), at full rank.
        rows, regression, mean: z = rows x, [n, D]; R [n, s]; z̄ - R c̄ [n].
    """

    blocks: tuple[Block, ...]
    elements: tuple[Tensor, ...]
    factors: tuple[Factors, ...]
    rows: Tensor
    regression: Tensor
    mean: Tensor

    def in_row(self, anatomy: AttentionAnatomy, rows: Sequence[Runs]) -> LowRankLayer:
        """Build the layer with latents in the order of a packed row of these runs per block, padded with zeros."""
        width, orders = len(self.mean), [torch.tensor(unit_order(runs)) for runs in rows]
        down, up = self.mean.new_zeros(sum(map(len, orders)), width), self.mean.new_zeros(width, sum(map(len, orders)))
        start = 0
        for order, elements, factors in zip(orders, self.elements, self.factors, strict=True):
            own = slice(start, start := start + len(order))
            down[own, elements] = take_or_zero(factors.down, order, 0)
            up[elements, own] = take_or_zero(factors.up, order)
        bias = self.mean - up @ (down @ self.mean)
        keys = anatomy.kv_heads * anatomy.head_dim
        key_bias, value_bias = bias[:keys].view(anatomy.kv_heads, -1), bias[keys:].view(anatomy.kv_heads, -1)
        key_up, value_up = torch.cat([self.regression, up], dim=1).split([keys, width - keys])
        return LowRankLayer(
            source=replace(
                anatomy,
                k_bias=key_bias if anatomy.k_bias is None else anatomy.k_bias + key_bias,
                v_bias=value_bias if anatomy.v_bias is None else anatomy.v_bias + value_bias,
            ),
            blocks=tuple(replace(block, rank=len(order)) for block, order in zip(self.blocks, orders, strict=True)),
            down=down @ self.rows,
            key_up=key_up.unflatten(0, (anatomy.kv_heads, -1)),
            value_up=value_up.unflatten(0, (anatomy.kv_heads, -1)),
            shared_down=down @ self.regression if self.regression.shape[1] else None,
        )


def unpredicted(
    anatomy: AttentionAnatomy,
    statistics: LayerStatistics,
    blocks: tuple[Block, ...],
    inputs: Tensor,
    shared: Tensor | None,
    first: int,
    stored: torch.dtype = torch.float64,
) -> Unpredicted:
    """Measure the residual that a layer's own latents have to encode.

    Args:
        anatomy: the layer in float64.
        statistics: statistics of all tokens, or of all but the first ones.
        blocks: heads that share latents; every key head and every value head is in one block.
        inputs: attention inputs of the calibration tokens [N, T, D].
        shared: decoded latents of earlier layers of the same tokens [N, T, s].
        first: number of first tokens that the cache keeps in full precision.
        stored: dtype of the down-projections of the latents.
    """
    weight = body_weight(statistics, inputs, first)
    scale = key_scale(anatomy)
    rows = kv_rows(anatomy) / scale[:, None]
    moment = centered(statistics).weighted_moment / scale / scale[:, None]
    share = weight.double() / weight.double().sum()
    mean_input = _mean(inputs[:, first:], share)
    mean = rows @ mean_input
    prediction = rows.new_zeros(len(rows), 0)
    if shared is not None:
        mean_shared = _mean(shared[:, first:], share)
        # Latents may vary far less than their means. Centering the moments afterwards would leave only rounding error.
        centered_shared = torch.stack([(each[first:].cpu().double() - mean_shared).to(each) for each in shared])
        source = anatomy.to(inputs.device, inputs.dtype)
        shared_moments = SharedMoments.of(source, inputs[:, first:], centered_shared, weight)
        cross = shared_moments.cross / scale[:, None]
        prediction = regression(cross, shared_moments.moment, stored)
        predicted = prediction @ cross.mT
        moment = moment - predicted - predicted.mT + prediction @ shared_moments.moment @ prediction.mT
        mean = mean - prediction @ mean_shared
    # First tokens are read at least as often as others. Their latents are exact, but only in directions with a latent.
    early = inputs[:, :first].flatten(0, 1).cpu().double() @ rows.mT
    if shared is not None:
        early = early - shared[:, :first].flatten(0, 1).cpu().double() @ prediction.mT
    early = early - mean
    moment = moment + FIRST_WEIGHT * (early.mT @ early) / max(len(weight), 1)
    moments = BlockMoments(moment, loss_metric(anatomy, statistics))
    elements = tuple(elements_of(anatomy, block) for block in blocks)
    factors = tuple(loss_weighted(moments.of(indices), len(indices)) for indices in elements)
    return Unpredicted(blocks, elements, factors, rows, prediction, mean)


@dataclass(frozen=True)
class SharedMoments:
    """Second moments of a layer's bias-free ``z`` and the latents that earlier layers cached of the same token.

    Keys include the weight of a key norm, as in :class:`LayerStatistics`; tokens are weighted as in its
    ``gradient_weighted_moment``.
    """

    cross: Tensor  # E[z c_sᵀ], [n, s]
    moment: Tensor  # E[c_s c_sᵀ], [s, s]

    @classmethod
    def of(
        cls,
        anatomy: AttentionAnatomy,
        inputs: Tensor,
        latents: Tensor,
        weight: Tensor,
    ) -> SharedMoments:
        """Measure the moments on the layer's inputs [N, T, D] and the shared latents [N, T, s] of the same tokens.

        ``weight`` [N T] is :attr:`LayerStatistics.token_weight`. Products within a sequence use the anatomy's dtype;
        sums are in float64, on the device that :mod:`surgery.running.moment_precision` chooses.
        """
        rows = kv_rows(anatomy)
        size = latents.shape[-1]
        precision = MomentPrecision.of(rows.device, 2 * 8 * size * (len(rows) + size))
        cross = torch.zeros(len(rows), size, dtype=torch.float64, device=precision.sums)
        moment = torch.zeros(size, size, dtype=torch.float64, device=precision.sums)
        for x, c, w in zip(inputs, latents, weight.view(inputs.shape[:2]), strict=True):
            c = c.to(rows)
            weighted = c * w.to(rows)[:, None]
            cross += precision.kept(rows @ (x.to(rows).mT @ weighted))
            moment += precision.kept(c.mT @ weighted)
        total = float(weight.double().sum())
        return cls(cross.cpu() / total, moment.cpu() / total)


def regression(cross: Tensor, moment: Tensor, stored: torch.dtype = torch.float64) -> Tensor:
    """Compute the regression ``E[z cᵀ] E[c cᵀ]^{-1}`` [n, s]; latents of very different sizes are scaled to one first.

    Latents that vary no more than rounding errors of the largest get no weight: they are channels that the row has and
    the layer does not need. Weights of the dtype ``stored`` shift a latent by about eps / 4 of the largest. Inputs
    after a LayerNorm have zero mean, so in one direction they vary by that alone.
    """
    variance = moment.diagonal()
    rounding = max(torch.finfo(moment.dtype).eps * len(moment), (torch.finfo(stored).eps / 4) ** 2)
    size = torch.where(variance > rounding * variance.max(), variance, torch.inf).rsqrt()
    (inverse,) = psd_powers(moment * size * size[:, None], (-1.0,))
    return cross * size @ inverse * size


@dataclass(frozen=True)
class RowSpectrum:
    """Energies of each block's latents, descending, over which the bytes of a row are allocated."""

    energies: tuple[Tensor, ...]

    def sections(self, factor: float = 1.0) -> list[Section]:
        """Return the row's section of each block, with energies scaled by ``factor``."""
        return [Section(factor * each, least=1) for each in self.energies]


@dataclass(frozen=True)
class QuantizedLowRank:
    """Converted layer with its quantizer.

    Attributes:
        spectrum: energies of all latents, for the allocation of bytes.
        layer: low-rank form, with latents in the order of the row.
        quantizer: means and steps of the latents.
        clipped: share of the calibration values outside the range of their channel.
    """

    spectrum: RowSpectrum
    layer: LowRankLayer
    quantizer: TokenQuantizer
    clipped: float


def convert_layer(
    anatomy: AttentionAnatomy,
    statistics: LayerStatistics,
    remainder: Unpredicted,
    rows: Sequence[Runs],
    inputs: Tensor,
    shared: Tensor | None,
    first: int,
) -> QuantizedLowRank:
    """Convert one layer to a packed row; ``rows``: runs per block, other arguments as for :func:`unpredicted`."""
    layer = remainder.in_row(anatomy, rows)
    indices = fit_indices(inputs[:, first:].shape[:2].numel())
    body = inputs[:, first:].flatten(0, 1)[indices]
    others = None if shared is None else shared[:, first:].flatten(0, 1)[indices]
    values = layer.to(body.device, torch.float32).latents(body.float(), None if others is None else others.float())
    weight = body_weight(statistics, inputs, first)[indices]
    spectrum = RowSpectrum(tuple(factors.energy for factors in remainder.factors))
    return QuantizedLowRank(spectrum, layer, *fitted_quantizer(tuple(chain.from_iterable(rows)), values, weight))


def body_weight(statistics: LayerStatistics, inputs: Tensor, first: int) -> Tensor:
    """Return the weights [N (T - first)] of the tokens after the first ones, which the statistics may include."""
    if statistics.token_weight is None:  # no gradient reaches the layer
        return torch.ones(len(inputs) * (inputs.shape[1] - first), dtype=torch.float64)
    return statistics.token_weight.view(len(inputs), -1)[:, first - inputs.shape[1] :].flatten()


def _mean(values: Tensor, share: Tensor) -> Tensor:
    """Compute the weighted mean of values [N, T, n] in float64, with weights [N T] that sum to one."""
    parts = zip(values, share.view(values.shape[:2]), strict=True)
    return sum(weight @ each.cpu().double() for each, weight in parts)
