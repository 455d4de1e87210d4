"""A layer whose cache is packed: exact but for what its bits lose, and in the order of its row."""

from dataclasses import replace

import pytest
import torch
from random_layers import random_attention

from surgery.families.attention import CapturedAttention
from surgery.model.token_format import TokenFormat
from surgery.transforms import quantized_mla
from surgery.transforms.latent_layer import SimulatedAttention
from surgery.transforms.row_quantizer import reader

RUNS = (("8", 6), ("4+4", 2)), (("4+4", 2), ("8", 8))
"""Of 12 values and 12 numbers of the shared key; the last two of each are in the fields of least bits."""


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "biased"])
def layer(request, weighted_statistics):
    anatomy = random_attention(4, 2, 24, 6, biased=request.param)
    inputs = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.cat([part.flatten(2) for part in (anatomy.project(inputs).k, anatomy.project(inputs).v)], -1)[:, 2:]
    return anatomy, inputs, weighted_statistics(rows.flatten(0, 1))


def converted(layer, runs):
    anatomy, inputs, statistics = layer
    basis = quantized_mla.key_basis(anatomy, statistics)
    order = quantized_mla.spectra(anatomy, statistics, basis).order
    return quantized_mla.convert_layer(anatomy, statistics, basis, order, runs, inputs, first=2)


def output_error(layer, result) -> float:
    anatomy, inputs, _ = layer
    source = CapturedAttention(anatomy.to(torch.float32))(inputs.float())[0]
    read = reader(result.quantizer, 2, result.layer.neighboring())
    results = SimulatedAttention(result.layer.to(torch.float32), read=read)(inputs.float())[0]
    return float((results - source).norm() / source.norm())


def test_eight_bits_lose_hardly_anything(layer):
    eight = converted(layer, ((("8", 12),), (("8", 12),)))
    assert output_error(layer, eight) < 0.02
    four = converted(layer, ((("4+4", 6),), (("4+4", 6),)))
    assert output_error(layer, eight) < output_error(layer, four) < 0.3


def test_channels_that_a_row_has_room_for_and_a_layer_has_not_are_zero(layer):
    result = converted(layer, ((("8", 16),), (("8", 14),)))
    assert result.layer.rank == 16 and result.layer.rope_dim == 14
    assert not result.layer.down[12:16].any() and not result.layer.query_up[..., 12:16].any()
    assert float(result.layer.inv_freq[-1]) == 0
    assert output_error(layer, result) == pytest.approx(
        output_error(layer, converted(layer, ((("8", 12),), (("8", 12),)))), abs=1e-3
    )


def test_wide_fields_hold_the_channels_of_most_energy(layer):
    anatomy, _, statistics = layer
    result = converted(layer, RUNS)
    bits = torch.tensor(TokenFormat((*RUNS[0], *RUNS[1])).bits())
    basis = quantized_mla.key_basis(anatomy, statistics)
    components = quantized_mla.spectra(anatomy, statistics, basis).components
    wide = sorted(components.tolist(), reverse=True)[:4]
    frequencies = anatomy.inv_freq[basis.frequency]
    selection = sorted(float(frequencies[int((components == energy).nonzero()[0, 0])]) for energy in wide)
    pairs = bits[10:].view(-1, 2)[:, 0]  # of the shared key, after 6 + 4 values
    assert sorted(result.layer.inv_freq[pairs == 8].tolist()) == pytest.approx(selection)


def test_value_latents_are_a_basis_in_which_one_direction_has_the_mean(layer):
    anatomy, _, statistics = layer
    latents = quantized_mla.ValueLatents.of(anatomy, statistics)
    assert torch.allclose(latents.down @ latents.up, torch.eye(12, dtype=torch.float64), atol=1e-9)
    mean = latents.down @ statistics.weighted_mean[12:]
    assert mean.abs().argmax() == latents.mean and mean.norm() > 0.1
    others = torch.arange(12) != latents.mean
    assert mean[others].abs().max() < 1e-9 * mean.norm()
    moment = statistics.weighted_moment - torch.outer(statistics.weighted_mean, statistics.weighted_mean)
    covariance = latents.down @ moment[12:, 12:] @ latents.down.mT
    assert torch.allclose(covariance.diagonal(), latents.energy)
    correlation = covariance[others][:, others]
    assert torch.allclose(correlation, correlation.diagonal().diag(), atol=1e-9)
    assert (latents.energy.diff() <= 0).all()


def test_a_row_of_few_values_holds_their_mean(layer):
    """The mean is far larger than the deviation, and its direction varies least."""
    anatomy, inputs, statistics = layer
    values = statistics.weighted_moment[12:, 12:] - torch.outer(*[statistics.weighted_mean[12:]] * 2)
    least = torch.linalg.eigh(values)[1][:, 0]
    shift = torch.cat([torch.zeros(12, dtype=torch.float64), 50 * least])
    mean = statistics.weighted_mean + shift
    moment = statistics.weighted_moment - torch.outer(*[statistics.weighted_mean] * 2) + torch.outer(mean, mean)
    bias = shift[12:] if anatomy.v_bias is None else anatomy.v_bias.flatten() + shift[12:]
    shifted = replace(anatomy, v_bias=bias.view(2, 6))
    statistics = replace(statistics, weighted_mean=mean, weighted_moment=moment)
    result = converted((shifted, inputs, statistics), ((("8", 4),), (("8", 12),)))
    assert output_error((shifted, inputs, statistics), result) < 0.4


def test_without_a_mean_all_directions_are_principal(layer):
    anatomy, _, statistics = layer
    mean = statistics.weighted_mean
    zero = replace(statistics, weighted_mean=torch.zeros_like(mean))
    latents = quantized_mla.ValueLatents.of(anatomy, zero)
    covariance = latents.down @ zero.weighted_moment[12:, 12:] @ latents.down.mT
    assert latents.mean is None and torch.allclose(covariance, latents.energy.diag(), atol=1e-9)
