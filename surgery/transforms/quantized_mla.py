"""Quantized MLA: nearly all components are kept, and bits are allocated to each by its energy.

The keys of a layer change to their loss-weighted complex basis (:func:`surgery.transforms.mla.key_basis`, exact), and
all components keep RoPE. The values get a latent in the same metric, with one direction for their mean: dropping any
other direction drops no mean. Both are packed into a row
(:mod:`surgery.transforms.row_allocation`), with means and steps of every channel fitted to calibration text. Keys and
values need no rebuilding when they are read, and no approximation depends on the distance of tokens.

The keys of a token tell much about its values, and they are cached in any case. With ``predicts_values`` the latent
holds only what the quantized keys k̂ do not tell (predictive coding in a closed loop, as in
:mod:`surgery.transforms.quantized_low_rank`):

    latent   c = down (v - P k̂), cached as Q(c)
    read     v̂ = P k̂ + up Q(c)

k̂ is before RoPE, and P the weighted regression of v on k̂. So outputs sum latents and unrotated keys. The projection
computes down (v - P k); :meth:`surgery.model.token_quantizer.TokenQuantizer.corrected` adds down P (k - k̂).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from surgery.calibration.statistics import LayerStatistics
from surgery.families.anatomy import AttentionAnatomy
from surgery.model.token_format import Runs
from surgery.model.token_quantizer import TokenQuantizer
from surgery.transforms import mla
from surgery.transforms.algebra import damp, eigh_descending, psd_powers, reduced_rank_projection, solver_of
from surgery.transforms.key_basis import KeyBasis
from surgery.transforms.latent_layer import LatentLayer, interleaving
from surgery.transforms.partial_rope import latent_form, truncate
from surgery.transforms.row_allocation import Section, unit_order
from surgery.transforms.row_quantizer import centered, fit_indices, fitted_quantizer, take_or_zero

METHOD = replace(mla.METHODS["fisher"], lags=False)
"""Method "fisher" without lag statistics: every component keeps RoPE, so none has to be chosen."""


@dataclass(frozen=True)
class LayerSpectra:
    """Energies over which the bytes of a layer's row are allocated, of key components [P] and of latents of values.

    Each is twice the predicted loss increase of dropping one, in nats; descending.
    """

    components: Tensor
    values: Tensor

    @property
    def order(self) -> Tensor:
        """Indices of all components by descending energy."""
        return self.components.argsort(descending=True, stable=True)

    def sections(self, factor: float = 1.0) -> list[Section]:
        """Return the sections of a row, latent and shared key, with energies scaled by ``factor``."""
        return [Section(factor * self.values, least=1), Section(factor * self.components[self.order], unit=2)]


@dataclass(frozen=True)
class QuantizedLatents:
    """Converted layer, channels in the order of the row, with its quantizer, which interleaves rotary pairs.

    ``clipped`` is the share of the calibration values outside the range of their channel.
    """

    layer: LatentLayer
    quantizer: TokenQuantizer
    clipped: float


@dataclass(frozen=True)
class ValueLatents:
    """Directions of the latent of a layer's values, by descending energy; float64.

    The weighted mean lies in one direction, which a row must hold. The others are the KLT of its complement.

    Attributes:
        down, up: maps from values [n] to the latent and back, [n, n] each.
        energy: variances in the metric of the loss, [n].
        mean: index of the direction of the mean; None if the mean is zero.
    """

    down: Tensor
    up: Tensor
    energy: Tensor
    mean: int | None

    @classmethod
    def of(cls, anatomy: AttentionAnatomy, statistics: LayerStatistics) -> ValueLatents:
        """Compute the directions from statistics of all tokens but the first, which need not be centered."""
        values, mean = slice(anatomy.kv_heads * anatomy.head_dim, None), statistics.weighted_mean
        moment = centered(statistics).gradient_weighted_moment[values, values]
        return cls.of_moment(moment, statistics.metric[values, values], None if mean is None else mean[values])

    @classmethod
    def of_moment(cls, moment: Tensor, metric: Tensor, mean: Tensor | None) -> ValueLatents:
        """Compute the directions of values with a centered moment [n, n] and a mean [n], in a metric of the loss."""
        metric = damp(metric)
        if mean is None or not mean.any():
            return cls(*reduced_rank_projection(moment, metric, len(moment)), None)
        solver = solver_of(moment)
        root, inverse = psd_powers(metric.to(solver), (0.5, -0.5))
        moment = root @ moment.to(solver) @ root
        direction = (root @ mean.to(solver))[:, None]
        direction = direction / direction.norm()
        complement = torch.eye(len(root), dtype=root.dtype, device=solver) - direction @ direction.mT
        # The direction itself gets a negative eigenvalue, and comes last.
        energy, vectors = eigh_descending(complement @ moment @ complement - direction @ direction.mT)
        energy = torch.cat([energy[:-1], (direction.mT @ moment @ direction)[0]])
        order = energy.argsort(descending=True, stable=True)
        energy, vectors = energy[order], torch.cat([vectors[:, :-1], direction], dim=1)[:, order]
        parts = (vectors.mT @ root, inverse @ vectors, energy.clamp_min(0))
        return cls(*(each.to(metric.device) for each in parts), order.tolist().index(len(order) - 1))

    def held(self, order: list[int]) -> list[int]:
        """Return an order of directions in a row; the mean takes the place of the last one if it is not there."""
        if self.mean is None or self.mean in order:
            return order
        return [self.mean if each == max(order) else each for each in order]


def key_basis(anatomy: AttentionAnatomy, statistics: LayerStatistics) -> KeyBasis:
    """Compute the basis of a layer's keys."""
    return mla.key_basis(METHOD, anatomy, centered(statistics), None)


def spectra(anatomy: AttentionAnatomy, statistics: LayerStatistics, basis: KeyBasis) -> LayerSpectra:
    """Compute the energies of a layer."""
    components = mla.component_energies(anatomy, centered(statistics), basis)
    return LayerSpectra(components, ValueLatents.of(anatomy, statistics).energy)


@dataclass(frozen=True)
class ValuePrediction:
    """Prediction of a layer's values from its quantized keys, in the order of a row, half-split.

    Attributes:
        regression: P [n, ρ], float64; a ridge regression with λ = unknowns / tokens, relative to each key's variance.
        latents: directions of v - P k̂.
    """

    regression: Tensor
    latents: ValueLatents

    @classmethod
    def of(
        cls,
        anatomy: AttentionAnatomy,
        statistics: LayerStatistics,
        basis: KeyBasis,
        order: Tensor,
        runs: Runs,
        inputs: Tensor,
        first: int,
    ) -> ValuePrediction:
        """Regress the values of calibration tokens on keys in these runs; arguments as in :func:`convert_layer`."""
        whole = latent_form(anatomy, basis, order)
        layer = _in_order(whole, list(range(whole.rank)), unit_order(runs, 2)).to(inputs.device, torch.float32)
        body, rank, weight = inputs[:, first:], layer.rank, statistics.token_weight
        weight = torch.ones(body.shape[:2].numel()) if weight is None else weight

        def values_and_keys(hidden: Tensor) -> Tensor:
            return nn.functional.linear(hidden.float(), layer.down, layer.down_bias)[..., layer.neighboring()]

        indices = fit_indices(len(weight))
        fitted = values_and_keys(body.flatten(0, 1)[indices])
        quantizer = fitted_quantizer(runs, fitted[:, rank:], weight[indices], 0)[0].to(fitted.device)
        shift = fitted.mean(0)  # near the means, so that moments in fp32 lose nothing
        mean = torch.zeros(len(shift), dtype=torch.float64)
        moment = torch.outer(mean, mean)
        for hidden, part in zip(body, (weight / weight.sum()).to(shift).view(len(body), -1), strict=True):
            read = values_and_keys(hidden)
            read = torch.cat([read[:, :rank], quantizer.read(read[:, rank:])], dim=-1) - shift
            mean += (part @ read).cpu()
            moment += (read.mT @ (part[:, None] * read)).cpu()
        moment -= torch.outer(mean, mean)
        mean += shift.cpu()
        values, cross, gram = moment[:rank, :rank], moment[:rank, rank:], moment[rank:, rank:]
        ridge = gram.diagonal() * len(gram) / len(weight)
        regression = torch.linalg.solve(gram + torch.where(ridge > 0, ridge, 1.0).diag(), cross.mT).mT
        residual = values - regression @ cross.mT
        offset = anatomy.kv_heads * anatomy.head_dim
        metric = statistics.metric[offset:, offset:]
        latents = ValueLatents.of_moment(residual, metric, mean[:rank] - regression @ mean[rank:])
        return cls(regression[:, interleaving(layer.rope_dim).argsort()], latents)


def convert_layer(
    anatomy: AttentionAnatomy,
    statistics: LayerStatistics,
    basis: KeyBasis,
    order: Tensor,
    runs: tuple[Runs, Runs],
    inputs: Tensor,
    first: int,
    prediction: ValuePrediction | None = None,
) -> QuantizedLatents:
    """Convert one layer to MLA with a packed row.

    Args:
        anatomy: the layer in float64.
        statistics: statistics without the first tokens.
        basis: from :func:`key_basis`.
        order: indices of the components by descending energy.
        runs: runs of the latent and of the shared key.
        inputs: attention inputs of the calibration tokens [N, T, D].
        first: number of first tokens that the cache keeps in full precision.
        prediction: prediction of values from keys in these runs, or None.
    """
    latent_order, rope_order = (unit_order(each, unit) for each, unit in zip(runs, (1, 2), strict=True))
    latents = ValueLatents.of(anatomy, statistics) if prediction is None else prediction.latents
    full = truncate(latent_form(anatomy, basis, order), latents.down, latents.up)
    latent_order = latents.held(latent_order)
    layer, correction = _in_order(full, latent_order, rope_order), None
    if prediction is not None:
        predicted = take_or_zero(latents.down, torch.tensor(latent_order), 0) @ prediction.regression
        layer = _with_prediction(layer, predicted.to(layer.down), prediction.regression.to(layer.down))
        correction = predicted[:, interleaving(layer.rope_dim)]
    body = inputs[:, first:].flatten(0, 1)
    indices = fit_indices(len(body))
    down = layer.to(body.device, torch.float32)
    values = nn.functional.linear(body[indices].float(), down.down, down.down_bias)[:, layer.neighboring()]
    weight = None if statistics.token_weight is None else statistics.token_weight[indices]
    fitted = fitted_quantizer((*runs[0], *runs[1]), values, weight, layer.rank, correction)
    return QuantizedLatents(layer, *fitted)


def _with_prediction(layer: LatentLayer, predicted: Tensor, regression: Tensor) -> LatentLayer:
    """Take what keys predict, ``predicted`` [r, ρ] of latents and ``regression`` [n, ρ] of values, from the latents."""
    rank, source, bias = layer.rank, layer.source, layer.down_bias
    of_heads = regression.unflatten(0, (source.kv_heads, -1)).repeat_interleave(source.heads // source.kv_heads, 0)
    if bias is not None:
        bias = torch.cat([bias[:rank] - predicted @ bias[rank:], bias[rank:]])
    return replace(
        layer,
        down=torch.cat([layer.down[:rank] - predicted @ layer.down[rank:], layer.down[rank:]]),
        down_bias=bias,
        value_up=torch.cat([layer.value_up, of_heads], dim=-1),
    )


def row_frequencies(inv_freq: Tensor, frequency: Tensor, runs: Runs) -> Tensor:
    """Return the inverse frequencies of a row's rotary pairs, in row order; 0 for pairs without a component.

    Args:
        inv_freq: inverse frequencies of the family, [d/2].
        frequency: frequency index of each component, by descending energy.
        runs: runs of the shared key.
    """
    return take_or_zero(inv_freq[frequency], torch.tensor(unit_order(runs, 2), dtype=torch.long))


def _in_order(layer: LatentLayer, latent_order: list[int], rope_order: list[int]) -> LatentLayer:
    """Reorder the layer's channels to the order of a packed row; indices beyond the layer's channels become zeros."""
    rank, pairs = layer.rank, layer.rope_dim // 2
    latent = torch.tensor(latent_order)
    component = torch.tensor(rope_order, dtype=torch.long)
    parts = [(latent, rank, 0), (component, pairs, rank), (component, pairs, rank + pairs)]
    order = torch.cat(
        [torch.where(indices < count, start + indices, len(layer.down)) for indices, count, start in parts]
    )
    return replace(
        layer,
        rotates_all=True,
        down=take_or_zero(layer.down, order, 0),
        down_bias=None if layer.down_bias is None else take_or_zero(layer.down_bias, order),
        query_up=take_or_zero(layer.query_up, order),
        value_up=take_or_zero(layer.value_up, latent),
        inv_freq=take_or_zero(layer.inv_freq, component),
    )
