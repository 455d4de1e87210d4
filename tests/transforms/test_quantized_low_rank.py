"""Low-rank layers of packed rows: exact but for what bits lose, alone and on decoded latents of an earlier layer."""

from dataclasses import replace

import pytest
import torch
from random_layers import latent_mask, random, random_attention

from surgery.families.anatomy import HeadNorm
from surgery.families.attention import CapturedAttention
from surgery.model.low_rank_entry import Block
from surgery.model.token_format import TokenFormat
from surgery.model.token_quantizer import TokenQuantizer
from surgery.transforms.low_rank_layer import SimulatedLowRank
from surgery.transforms.quantized_low_rank import convert_layer, regression, unpredicted
from surgery.transforms.row_quantizer import centered, fit_steps, reader

FIRST = 2
EIGHT, FOUR = (("8", 24),), (("4+4", 12),)
"""All 24 latents in 8 bits, and in 4."""
JOINT = (Block(0, (0, 1), (0, 1)),)
HEADS = (Block(0, (0,), ()), Block(0, (1,), ()), Block(0, (), (0,)), Block(0, (), (1,)))


@pytest.fixture(scope="module", params=["plain", "biased", "normed"])
def layer(request, weighted_statistics):
    """Anatomy, inputs with a mean [3, 40, 24], and statistics of all tokens but the first."""
    biased = request.param == "biased"
    norm = HeadNorm(random(6, seed=9).abs() + 0.5, 1e-6) if request.param == "normed" else None
    anatomy = random_attention(4, 2, 24, 6, biased=biased, bias_size=3, k_norm=norm)
    inputs = random(3, 40, 24, seed=20) + 2 * random(24, seed=21)
    inputs[:, 0] *= 5  # a first token unlike any other
    projection = anatomy.project(inputs)
    flat = torch.cat([part.flatten(2) for part in (projection.k, projection.v)], -1)[:, FIRST:].flatten(0, 1)
    return anatomy, inputs, weighted_statistics(flat, normed=norm is not None)


def converted(layer, *rows, shared=None, blocks=JOINT):
    """Convert to a row of these runs of every block."""
    anatomy, inputs, statistics = layer
    leftovers = unpredicted(anatomy, statistics, blocks, inputs, shared, FIRST)
    return convert_layer(anatomy, statistics, leftovers, rows, inputs, shared, FIRST)


def output_error(layer, result, earlier=(), read=None) -> float:
    anatomy, inputs, _ = layer
    source = CapturedAttention(anatomy)(inputs)[0]
    read = read or reader(result.quantizer, FIRST)
    results = SimulatedLowRank(result.layer, earlier, read=read)(inputs)[0]
    return float((results - source).norm() / source.norm())


def exact(values):
    return values


def test_all_latents_in_full_precision_are_the_source_and_more_bits_lose_less(layer):
    assert output_error(layer, converted(layer, EIGHT), read=exact) < 1e-9
    eight, four = (output_error(layer, converted(layer, runs)) for runs in (EIGHT, FOUR))
    assert eight < 0.03 and eight < four < 0.3


def test_heads_with_latents_of_their_own_are_the_source(layer):
    result = converted(layer, *[(("8", 6),)] * 4, blocks=HEADS)
    assert output_error(layer, result, read=exact) < 1e-9 and output_error(layer, result) < 0.03
    mask = latent_mask(result.layer)
    assert not torch.cat([result.layer.key_up, result.layer.value_up])[~mask[:, None].expand(-1, 6, -1)].any()
    assert [len(energies) for energies in result.spectrum.energies] == [6] * 4


def test_what_no_latent_tells_has_its_mean(layer):
    """Six latents of 24 are exact; what they leave out of keys and values has no mean over calibration text."""
    anatomy, inputs, statistics = layer
    few = converted(layer, (("8", 6),)).layer
    bare = replace(few.source, k_norm=None)
    rebuilt = replace(few, source=bare).rebuilt(few.latents(inputs))
    keys = inputs @ anatomy.k.flatten(0, 1).T, inputs @ anatomy.v.flatten(0, 1).T
    biases = anatomy.k_bias, anatomy.v_bias
    for result, product, bias in zip(rebuilt, keys, biases, strict=True):
        leftovers = product + (0 if bias is None else bias.flatten()) - result.flatten(2)
        mean = statistics.token_weight.double() @ leftovers[:, FIRST:].flatten(0, 1) / len(statistics.token_weight)
        assert float(mean.abs().max()) < 1e-5 * float(product.abs().max()) and float(leftovers.abs().max()) > 0.1


def test_channels_without_a_latent_are_zero(layer):
    result = converted(layer, (("8", 30),))
    assert result.layer.rank == 30
    assert not result.layer.down[24:].any() and not result.layer.key_up[..., 24:].any()


def test_latents_that_earlier_ones_tell_hold_what_is_left(layer):
    """The earlier layer's latents are this layer's own keys and values, coarsely quantized: a residual is left."""
    _, inputs, _ = layer
    before = converted(layer, FOUR)
    decoded = reader(before.quantizer, FIRST)(before.layer.latents(inputs))
    after = converted(layer, FOUR, shared=decoded)
    assert float(after.spectrum.energies[0].sum()) < 0.1 * float(before.spectrum.energies[0].sum())
    earlier = SimulatedLowRank(before.layer, read=reader(before.quantizer, FIRST), remembers=True)
    earlier(inputs)
    assert output_error(layer, after, (earlier,)) < 0.2 * output_error(layer, before)
    exact_first = SimulatedLowRank(before.layer, read=exact, remembers=True)
    exact_first(inputs)
    assert output_error(layer, after, (exact_first,), exact) < 1e-9
    assert after.layer.shared == 24 and after.layer.shared_down.shape == (24, 24)
    first = after.layer.latents(inputs, decoded)[:, :FIRST]
    torch.testing.assert_close(reader(after.quantizer, FIRST)(after.layer.latents(inputs, decoded))[:, :FIRST], first)


def test_a_centered_moment_has_no_mean(layer):
    _, _, statistics = layer
    moment = centered(statistics).weighted_moment
    assert torch.linalg.eigvalsh(moment).min() > -1e-9 * float(moment.trace())
    assert float(moment.trace()) < float(statistics.weighted_moment.trace())


def test_steps_leave_the_least_error_and_pairs_share_them():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(500, 8, generator=generator) * torch.tensor([1, 2, 3, 4, 1, 1, 5, 5.0]) + 3
    weight = torch.rand(500, generator=generator)
    quantizer = TokenQuantizer(TokenFormat((("4+4", 4),)))
    fit_steps(quantizer, values, weight, rank=4)
    steps = quantizer.step.clone()
    assert torch.equal(steps[4::2], steps[5::2])

    def error() -> torch.Tensor:
        each = ((quantizer.read(values) - values).square() * weight[:, None]).sum(0)
        return torch.cat([each[:4], each[4:].view(-1, 2).sum(-1)])

    best = error()
    for factor in (0.6, 0.8, 1.25, 1.6):
        quantizer.step = steps * factor
        assert bool((error() >= 0.97 * best).all())
    torch.testing.assert_close(quantizer.mean, (values * weight[:, None]).sum(0) / weight.sum(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variance", [0.0, 1e-20])
def test_nothing_is_predicted_from_a_latent_that_does_not_vary(variance):
    generator = torch.Generator().manual_seed(22)
    latents = torch.randn(64, 5, generator=generator, dtype=torch.float64)
    z = latents @ torch.randn(5, 7, generator=generator, dtype=torch.float64)
    cross, moment = z.mT @ latents, torch.zeros(6, 6, dtype=torch.float64)
    moment[:5, :5], moment[5, 5] = latents.mT @ latents, variance
    constant = torch.full((7, 1), 1e-15, dtype=torch.float64)  # what rounding leaves
    result = regression(torch.cat([cross, constant], dim=1), moment)
    torch.testing.assert_close(result[:, :5], regression(cross, moment[:5, :5]))
    assert not result[:, 5].any()


def test_nothing_is_predicted_from_what_rounding_of_stored_weights_leaves():
    # As after a LayerNorm, whose outputs have no mean: there a latent is what bfloat16 makes of its weights.
    moment = torch.diag(torch.tensor([1.0, 1e-3, 1e-8], dtype=torch.float64))
    cross = torch.tensor([[0.5, 1e-3, 1e-5]], dtype=torch.float64)
    torch.testing.assert_close(regression(cross, moment), torch.tensor([[0.5, 1.0, 1e3]], dtype=torch.float64))
    result = regression(cross, moment, torch.bfloat16)
    torch.testing.assert_close(result, torch.tensor([[0.5, 1.0, 0.0]], dtype=torch.float64))
