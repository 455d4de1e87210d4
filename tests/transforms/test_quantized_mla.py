"""A layer whose cache is packed: exact but for what its bits lose, and in the order of its row."""

from dataclasses import replace

import pytest
import torch
from random_layers import random_attention

from surgery.families.attention import CapturedAttention
from surgery.model.token_format import TokenFormat
from surgery.transforms import quantized_mla
from surgery.transforms.latent_layer import SimulatedAttention
from surgery.transforms.quantized_mla import ValuePrediction
from surgery.transforms.row_quantizer import reader

RUNS = (("8", 6), ("4+4", 2)), (("4+4", 2), ("8", 8))
"""Of 12 values and 12 numbers of the shared key; the last two of each are in the fields of least bits."""


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "biased"])
def layer(request, weighted_statistics):
    anatomy = random_attention(4, 2, 24, 6, biased=request.param)
    inputs = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.cat([part.flatten(2) for part in (anatomy.project(inputs).k, anatomy.project(inputs).v)], -1)[:, 2:]
    return anatomy, inputs, weighted_statistics(rows.flatten(0, 1))


def converted(layer, runs, predicts=False):
    anatomy, inputs, statistics = layer
    basis = quantized_mla.key_basis(anatomy, statistics)
    order = quantized_mla.spectra(anatomy, statistics, basis).order
    prediction = None
    if predicts:
        prediction = ValuePrediction.of(anatomy, statistics, basis, order, runs[1], inputs, first=2)
    return quantized_mla.convert_layer(anatomy, statistics, basis, order, runs, inputs, 2, prediction)


def output_error(layer, result) -> float:
    anatomy, inputs, _ = layer
    source = CapturedAttention(anatomy.to(torch.float32))(inputs.float())[0]
    read = reader(result.quantizer, 2, result.layer.neighboring())
    results = SimulatedAttention(result.layer.to(torch.float32), read=read)(inputs.float())[0]
    return float((results - source).norm() / source.norm())


@pytest.mark.parametrize("predicts", [False, True])
def test_eight_bits_lose_hardly_anything(layer, predicts):
    eight = converted(layer, ((("8", 12),), (("8", 12),)), predicts)
    assert output_error(layer, eight) < 0.02
    four = converted(layer, ((("4+4", 6),), (("4+4", 6),)), predicts)
    assert output_error(layer, eight) < output_error(layer, four) < 0.3


def test_keys_predict_values(layer):
    """Values that keys determine, up to a part of full rank, are read from keys of few bits."""
    anatomy, inputs, statistics = layer
    keys, generator = 12, torch.Generator().manual_seed(1)
    mix = torch.randn(12, keys, generator=generator, dtype=torch.float64)
    anatomy = replace(
        anatomy, v=((mix @ anatomy.k.flatten(0, 1)) + 0.1 * anatomy.v.flatten(0, 1)).unflatten(0, (2, -1))
    )
    rows = torch.cat([part.flatten(2) for part in (anatomy.project(inputs).k, anatomy.project(inputs).v)], -1)[:, 2:]
    rows, weight = rows.flatten(0, 1), statistics.token_weight.double()
    weight = weight / weight.sum()
    moment, mean = rows.mT @ (weight[:, None] * rows), weight @ rows
    layer = anatomy, inputs, replace(statistics, weighted_moment=moment, weighted_mean=mean)
    runs = (("2+2+2+2", 3),), (("4+4", 6),)
    plain, predicted = converted(layer, runs), converted(layer, runs, predicts=True)
    assert output_error(layer, predicted) < 0.6 * output_error(layer, plain)
    assert predicted.layer.value_up.shape[-1] == 24 and predicted.quantizer.correction.shape == (12, 12)


def test_latents_make_up_for_the_rounding_of_keys(layer):
    """Values are read with the rounding of the latents alone, up to the fp32 of a quantizer."""
    result = converted(layer, ((("8", 12),), (("3+3+2", 4),)), predicts=True)
    values = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * 0.1 + result.quantizer.mean
    read = result.quantizer.read(values)
    up = result.layer.value_up[:, :, result.layer.neighboring()].flatten(0, 1).float()
    exact, got = values @ up.mT, read @ up.mT
    rounding = 0.5 * result.quantizer.step[:12] @ up[:, :12].abs().mT
    inside = ~result.quantizer.clipped(values)[:, :12].any(-1)
    assert inside.sum() > 10 and ((got - exact).abs() <= rounding * 1.01 + 1e-5)[inside].all()
    assert (read[:, 12:] - values[:, 12:]).abs().max() > 0.01


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


def test_a_row_without_keys_predicts_nothing(layer):
    """Budgets of a few bytes may leave none for keys."""
    rows = (("8", 12),), ()
    plain, predicted = (converted(layer, rows, predicts) for predicts in (False, True))
    assert predicted.quantizer.correction.shape == (12, 0)
    assert output_error(layer, predicted) == pytest.approx(output_error(layer, plain), rel=1e-3)
