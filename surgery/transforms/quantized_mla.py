"""MLA whose cache spends bits instead of rank: nearly all components are kept, each in the bits that it is worth.

The steps of a layer: the loss-weighted complex basis of the keys (:func:`surgery.transforms.mla.key_basis`, exact), all
of whose components keep RoPE; a latent of the values in the same metric; both packed into a row
(:mod:`surgery.transforms.row_allocation`); means and steps of every channel fitted to calibration text. Nothing of the
result is rebuilt when it is read, and nothing depends on how far apart tokens are.
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
from surgery.transforms.key_basis import KeyBasis
from surgery.transforms.latent_layer import LatentLayer
from surgery.transforms.row_allocation import Section, unit_order
from surgery.transforms.row_quantizer import fit_places, fitted_quantizer, take_or_zero

METHOD = replace(mla.METHODS["fisher"], lags=False)
"""Every component keeps RoPE, so that none has to be chosen by lags of attention."""


@dataclass(frozen=True)
class LayerSpectra:
    """Spectra on which a layer's bytes may be spent.

    Attributes:
        components: energies of the key's components, [P]: twice the loss in nats that leaving one out is expected to
            cost.
        values: the same of a latent of the values, descending.
    """

    components: Tensor
    values: Tensor

    @property
    def order(self) -> Tensor:
        """All components by descending energy."""
        return self.components.argsort(descending=True, stable=True)

    def sections(self, factor: float = 1.0) -> list[Section]:
        """Return the sections of a row, latent and shared key, with energies times a factor."""
        return [
            Section(factor * self.values, least=1),
            Section(factor * self.components[self.order], unit=2),
        ]


@dataclass(frozen=True)
class QuantizedLatents:
    """A converted layer.

    Attributes:
        layer: its latent form, channels in the order of the row.
        quantizer: means and steps, in the order of the model class, whose rotary pairs are neighbors.
        clipped: share of the calibration values that lie outside the range of their channel.
    """

    layer: LatentLayer
    quantizer: TokenQuantizer
    clipped: float


def spectra(anatomy: AttentionAnatomy, statistics: LayerStatistics, basis: KeyBasis) -> LayerSpectra:
    """Energies of a layer; the statistics are centered ones."""
    everything = torch.arange(basis.components)
    (values,) = mla.latent_energies(anatomy, statistics, basis, [everything])
    return LayerSpectra(mla.component_energies(anatomy, statistics, basis), values)


def convert_layer(
    anatomy: AttentionAnatomy,
    statistics: LayerStatistics,
    basis: KeyBasis,
    order: Tensor,
    runs: tuple[Runs, Runs],
    inputs: Tensor,
    first: int,
) -> QuantizedLatents:
    """Converts one layer.

    Args:
        anatomy: the layer in float64.
        statistics: centered ones, without the first tokens.
        basis: of its keys.
        order: of its components, by descending energy.
        runs: of the latent and of the shared key.
        inputs: of its attention, calibration tokens [N, T, D].
        first: tokens that the cache keeps in full precision.
    """
    latent_order, rope_order = (unit_order(each, unit) for each, unit in zip(runs, (1, 2), strict=True))
    rank = min(len(latent_order), anatomy.kv_heads * anatomy.value_dim)
    converted = mla.convert_layer(METHOD, anatomy, statistics, basis, order, rank)
    layer = _in_order(converted.truncated, latent_order, rope_order)
    body = inputs[:, first:].flatten(0, 1)
    indices = fit_places(len(body))
    down = layer.to(body.device, torch.float32)
    values = nn.functional.linear(body[indices].float(), down.down, down.down_bias)[:, layer.neighboring()]
    weight = None if statistics.token_weight is None else statistics.token_weight[indices]
    fitted = fitted_quantizer((*runs[0], *runs[1]), values, weight, layer.rank)
    return QuantizedLatents(layer, *fitted)


def row_frequencies(inv_freq: Tensor, frequency: Tensor, runs: Runs) -> Tensor:
    """Return the inverse frequencies of a row's pairs, in its order; 0 where no component is left.

    Args:
        inv_freq: of the family, [d/2].
        frequency: index of each component, by descending energy.
        runs: of the shared key.
    """
    return take_or_zero(inv_freq[frequency], torch.tensor(unit_order(runs, 2), dtype=torch.long))


def _in_order(layer: LatentLayer, latent_order: list[int], rope_order: list[int]) -> LatentLayer:
    """Return the same layer with its channels in the order of a row; a row without a channel becomes zeros."""
    rank, pairs = layer.rank, layer.rope_dim // 2
    latent = torch.tensor(latent_order)
    component = torch.tensor(rope_order, dtype=torch.long)
    parts = [(latent, rank, 0), (component, pairs, rank), (component, pairs, rank + pairs)]
    order = torch.cat([torch.where(places < count, start + places, len(layer.down)) for places, count, start in parts])
    return replace(
        layer,
        down=take_or_zero(layer.down, order, 0),
        down_bias=None if layer.down_bias is None else take_or_zero(layer.down_bias, order),
        query_up=take_or_zero(layer.query_up, order),
        value_up=take_or_zero(layer.value_up, latent),
        inv_freq=take_or_zero(layer.inv_freq, component),
    )
