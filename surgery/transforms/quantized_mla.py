"""MLA whose cache spends bits instead of rank: nearly all components are kept, each in the bits that it is worth.

The steps of a layer: the loss-weighted complex basis of the keys (:func:`surgery.transforms.mla.key_basis`, exact);
components whose rotation is worth less than the bits that they would save stand still; those and the values share one
latent, sorted by energy; rows of both are packed (:mod:`surgery.transforms.row_allocation`); means and steps of every
channel are fitted to calibration text. Nothing of the result is rebuilt when it is read.

Static steps per channel of a decorrelated cache are KVTC's and CommVQ's idea of calibration; the loss-gradient metric,
the complex basis and one price for ranks, rotations and bits are this package's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from surgery.calibration.statistics import LagStatistics, LayerStatistics
from surgery.families.anatomy import AttentionAnatomy
from surgery.model.token_format import Runs, TokenFormat
from surgery.model.token_quantizer import TokenQuantizer
from surgery.transforms import mla
from surgery.transforms.key_basis import KeyBasis
from surgery.transforms.latent_layer import LatentLayer, Read
from surgery.transforms.row_allocation import WIDTHS, noise, unit_order

STEP_FACTORS = (0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 1.0, 1.15, 1.35, 1.6, 2.0)
"""Steps that are tried, in units of 9 standard deviations over the levels of a channel."""
SAVED_SHARE = 0.5
"""Share of a component's bits that the joint latent saves, which holds it if it stands still."""


@dataclass(frozen=True)
class LayerSpectra:
    """What a layer's bytes may be spent on.

    Attributes:
        components: energies of the key's components, [P].
        rotations: loss predicted from taking RoPE from each, in the same unit, [P].
        values: energies of a latent of the values alone, descending.
    """

    components: Tensor
    rotations: Tensor
    values: Tensor


@dataclass(frozen=True)
class QuantizedLatents:
    """A converted layer.

    Attributes:
        layer: its latent form, channels in the order of the row.
        quantizer: means and steps, in the order of the model class, whose rotary pairs are neighbours.
        clipped: share of the calibration values that lie outside the range of their channel.
        energy: of all latents in the metric of the loss, descending.
        rope_error: predicted share of the squared scores lost with the dropped rotations.
    """

    layer: LatentLayer
    quantizer: TokenQuantizer
    clipped: float
    energy: Tensor
    rope_error: float


def centred(anatomy: AttentionAnatomy, statistics: LayerStatistics, inputs: Tensor, first: int) -> LayerStatistics:
    """Statistics whose moment is that of deviations from the mean, without the first tokens of each sequence.

    Args:
        anatomy: the layer in the dtype of the inputs.
        inputs: of its attention, calibration tokens [N, T, D].
        first: tokens that the cache keeps in full precision.
    """
    weights = statistics.token_weight.view(inputs.shape[:2])[:, first:].double()
    total, mean, moment = float(weights.sum()), 0, 0
    for sequence, weight in zip(inputs, weights, strict=True):
        projection = anatomy.project(sequence[None, first:])
        rows = torch.cat([projection.k.flatten(2), projection.v.flatten(2)], dim=-1)[0].double().cpu()
        mean = mean + weight @ rows / total
        moment = moment + (rows * weight[:, None]).mT @ rows / total
    moment = moment - torch.outer(mean, mean)
    return replace(statistics, weighted_moment=moment, weighted_mean=torch.zeros_like(mean))


def spectra(
    anatomy: AttentionAnatomy, statistics: LayerStatistics, basis: KeyBasis, lags: LagStatistics
) -> LayerSpectra:
    """Energies of a layer; the statistics are centred ones."""
    everything = torch.arange(basis.components)
    return LayerSpectra(
        mla.component_energies(anatomy, statistics, basis),
        mla.rotation_energies(anatomy, statistics, basis, lags),
        mla.latent_energies(anatomy, statistics, basis, [everything])[0],
    )


def rotated_components(found: LayerSpectra, price: float, factor: float) -> Tensor:
    """Indices of the components that keep RoPE, by descending energy.

    A component stands still where that is predicted to lose less than the bits that it saves in the joint latent.

    Args:
        price: of a bit of a channel, in units of energy.
        factor: by which predicted losses of dropped rotations are multiplied: they are far too low.
    """
    energy = found.components
    bits = torch.tensor([0, *WIDTHS], dtype=torch.float64)
    errors = torch.tensor([1.0, *map(noise, WIDTHS)], dtype=torch.float64)
    paid = (energy[:, None] * errors + 2 * price * bits).min(-1).values
    turns = factor * found.rotations > SAVED_SHARE * paid
    order = energy.argsort(descending=True, stable=True)
    return order[turns[order]]


def convert_layer(
    anatomy: AttentionAnatomy,
    statistics: LayerStatistics,
    basis: KeyBasis,
    lags: LagStatistics,
    rotated: Tensor,
    runs: tuple[Runs, Runs],
    inputs: Tensor,
    first: int,
) -> QuantizedLatents:
    """Converts one layer.

    Args:
        anatomy: the layer in float64.
        statistics: centred ones.
        rotated: from :func:`rotated_components`.
        runs: of the latent and of the shared key.
        inputs: of its attention, calibration tokens [N, T, D].
        first: tokens that the cache keeps in full precision.
    """
    latent_order, rope_order = (unit_order(each, unit) for each, unit in zip(runs, (1, 2), strict=True))
    # Rotated components that get no bits are left out.
    available = 2 * (basis.components - len(rotated)) + anatomy.kv_heads * anatomy.value_dim
    rank = min(len(latent_order), available)
    converted = mla.convert_layer(mla.METHODS["fisher"], anatomy, statistics, basis, rotated, rank, lags)
    layer = _in_order(converted.truncated, latent_order, rope_order)
    quantizer = TokenQuantizer(TokenFormat((*runs[0], *runs[1])))
    body = inputs[:, first:].flatten(0, 1).float()
    down = layer.to(body.device, body.dtype)
    values = nn.functional.linear(body, down.down, down.down_bias)[:, neighbours(layer)].cpu()
    weight = statistics.token_weight.view(inputs.shape[:2])[:, first:].flatten()
    fit_steps(quantizer, values, weight, layer.rank)
    clipped = float(quantizer.clipped(values).double().mean())
    return QuantizedLatents(layer, quantizer, clipped, converted.energy, converted.rope_error)


def fit_steps(quantizer: TokenQuantizer, values: Tensor, weight: Tensor, rank: int) -> None:
    """Sets means and steps to what leaves the least weighted squared error of values [T, n].

    Real and imaginary parts of a component, neighbours from channel ``rank`` on, share a step.
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


def neighbours(layer: LatentLayer) -> Tensor:
    """Return the channels of a layer in the order of the model class, whose rotary pairs are neighbours."""
    rope = torch.arange(layer.rope_dim).view(2, -1).mT.flatten()
    return torch.cat([torch.arange(layer.rank), layer.rank + rope])


def reader(layer: LatentLayer, quantizer: TokenQuantizer, first: int) -> Read:
    """Return what a cache gives back of a layer's unrotated values [B, T, r + ρ]."""
    order = neighbours(layer)
    back = order.argsort()

    def read(values: Tensor) -> Tensor:
        decoded = quantizer.to(values.device).read(values[..., order])[..., back]
        return torch.cat([values[:, :first], decoded[:, first:]], dim=1)

    return read


def row_frequencies(inv_freq: Tensor, frequency: Tensor, runs: Runs) -> Tensor:
    """Return the inverse frequencies of a row's pairs, in its order; 0 where no component is left.

    Args:
        inv_freq: of the family, [d/2].
        frequency: index of each rotated component, by descending energy.
        runs: of the shared key.
    """
    rates = torch.cat([inv_freq[frequency], inv_freq.new_zeros(1)])
    order = torch.tensor(unit_order(runs, 2), dtype=torch.long)
    return rates[order.clamp(max=len(frequency))]


def _in_order(layer: LatentLayer, latent_order: list[int], rope_order: list[int]) -> LatentLayer:
    """The same layer with its channels in the order of a row; what has no channel becomes zeros."""
    rank, pairs = layer.rank, layer.rope_dim // 2
    nothing = rank + 2 * pairs  # the place of a channel of zeros
    latent = torch.tensor(latent_order)
    component = torch.tensor(rope_order, dtype=torch.long)
    parts = [(latent, rank, 0), (component, pairs, rank), (component, pairs, rank + pairs)]
    order = torch.cat([torch.where(ranks < count, start + ranks, nothing) for ranks, count, start in parts])

    def in_order(tensor: Tensor, dim: int, order: Tensor = order) -> Tensor:
        return torch.cat([tensor, torch.zeros_like(tensor.narrow(dim, 0, 1))], dim).index_select(dim, order)

    return replace(
        layer,
        down=in_order(layer.down, 0),
        down_bias=None if layer.down_bias is None else in_order(layer.down_bias, 0),
        query_up=in_order(layer.query_up, -1),
        value_up=in_order(layer.value_up, -1, latent.clamp(max=rank)),
        inv_freq=torch.cat([layer.inv_freq, layer.inv_freq.new_zeros(1)])[component.clamp(max=pairs)],
    )
