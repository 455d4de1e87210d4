"""Low-rank keys and values: exact at full rank, predicted below it, and every named method does what it says."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from random_layers import latent_mask, random, random_attention
from tiny_models import DEMO, FAMILIES
from torch import Tensor

from surgery.calibration.library import weight_statistics
from surgery.calibration.settings import ConversionSettings
from surgery.calibration.statistics import LayerStatistics, MomentAccumulator
from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy, HeadNorm
from surgery.families.attention import CapturedAttention
from surgery.running.source import Source
from surgery.transforms.algebra import damp
from surgery.transforms.low_rank import LowRankConversion, loss_metric, low_rank_layer
from surgery.transforms.low_rank_layer import Block, SimulatedLowRank
from surgery.transforms.low_rank_methods import (
    METHODS,
    Factors,
    Method,
    blocks_for,
    check_factors,
    fisher_information,
    palu_ranks,
)

pytestmark = pytest.mark.usefixtures("one_core")

H, G, D, HEAD = 8, 4, 40, 6
WIDTH = 2 * G * HEAD
# Which of biases and norms a layer has.
KINDS = {"plain": (False, False), "biased": (True, False), "normed": (False, True), "both": (True, True)}


def random_layer(kind: str = "plain") -> AttentionAnatomy:
    biased, normed = KINDS[kind]
    return random_attention(
        *(H, G, D, HEAD),
        biased=biased,
        bias_size=5,
        q_norm=HeadNorm(random(HEAD, seed=8).abs() + 0.1, 1e-6) if normed else None,
        k_norm=HeadNorm(random(HEAD, seed=9).abs() + 0.1, 1e-6) if normed else None,
    )


def inputs_of(layer: AttentionAnatomy, seed: int = 20) -> Tensor:
    """Inputs with a mean, channels of all sizes and correlations between them."""
    mixture = random(4, 60, layer.hidden, seed=seed) @ random(layer.hidden, layer.hidden, seed=seed + 1)
    size = torch.logspace(0.5, -1, layer.hidden, dtype=torch.float64)
    return (mixture / layer.hidden**0.5 + random(layer.hidden, seed=seed + 2)) * size


def swept(layer: AttentionAnatomy) -> LayerStatistics:
    """Statistics as the sweep takes them, of a loss that is not like any other."""
    x = inputs_of(layer).requires_grad_()
    captured, moments = CapturedAttention(layer, gradients=True), MomentAccumulator(layer, gradients=True)
    out, _ = captured(x)
    (out * random(*out.shape, seed=30) * torch.linspace(0.1, 2, out.shape[-1])).sum().backward()
    moments.add(captured.projection, captured.inputs)
    return moments.result()


def bias_free(layer: AttentionAnatomy, x: Tensor) -> Tensor:
    """Keys before their norm and values without bias [tokens, n]."""
    return x.flatten(0, 1) @ torch.cat([layer.k.flatten(0, 1), layer.v.flatten(0, 1)]).mT


def unpredicted(converted: LowRankConversion, x: Tensor) -> Tensor:
    """Return the error of the bias-free keys and values [tokens, n]."""
    layer = converted.layer
    latents = x @ layer.down.mT
    up = torch.cat([layer.key_up.flatten(0, 1), layer.value_up.flatten(0, 1)])
    return bias_free(layer.source, x) - latents.flatten(0, 1) @ up.mT


def metric_of(statistics: LayerStatistics) -> Tensor:
    gradient = statistics.metric if statistics.raw_metric is None else statistics.raw_metric
    return damp(gradient)


def gradient_moment(error: Tensor, statistics: LayerStatistics) -> Tensor:
    """Second moment of errors [tokens, n], each token weighted as in the statistics."""
    weight = statistics.token_weight.double()
    return error.mT @ (error * weight[:, None]) / weight.sum()


def assert_predicted(converted: LowRankConversion, error: Tensor, statistics: LayerStatistics) -> None:
    keys = G * HEAD
    both = metric_of(statistics) * gradient_moment(error, statistics)
    assert converted.error == pytest.approx(float(both.sum()), rel=1e-6)
    assert converted.key_error == pytest.approx(float(both[:keys, :keys].sum()), rel=1e-6)
    assert converted.value_error == pytest.approx(float(both[keys:, keys:].sum()), rel=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_full_rank_changes_nothing(checkpoints, name):
    layer = Source.open(checkpoints(name), ConversionSettings()).anatomy(0).to(torch.float64)
    statistics, x = swept(layer), inputs_of(layer, seed=50)
    want, _ = CapturedAttention(layer)(x)
    for method in METHODS:
        converted = low_rank_layer(layer, statistics, blocks_for(method, layer, layer.kv_width), method)
        result, _ = SimulatedLowRank(converted.layer)(x)
        assert converted.layer.rank == layer.kv_width
        assert float((result - want).norm() / want.norm()) < 1e-9, method
        assert converted.error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", ["plain", "both"])
@pytest.mark.parametrize("method", METHODS)
def test_predicted_errors_are_the_measured_ones(method, kind):
    layer = random_layer(kind)
    statistics, blocks = swept(layer), blocks_for(method, layer, WIDTH * 3 // 4)
    converted = low_rank_layer(layer, statistics, blocks, method)
    assert_predicted(converted, unpredicted(converted, inputs_of(layer)), statistics)
    mask = latent_mask(converted.layer)
    ups = torch.cat([converted.layer.key_up, converted.layer.value_up]).mT
    assert not ups[~mask].any()
    assert ups.any(-1).any(0).all()  # every latent is read


def test_each_method_is_best_in_its_own_metric():
    layer = random_layer("both")
    statistics, x = swept(layer), inputs_of(layer)
    fisher, separate, whitened, palu = (
        low_rank_layer(layer, statistics, blocks_for(method, layer, WIDTH // 3), method) for method in METHODS
    )
    assert fisher.error < min(other.error for other in (separate, whitened, palu))
    assert separate.key_error < whitened.key_error and separate.value_error < whitened.value_error
    in_loss, plain = (
        [part.square().sum() for part in unpredicted(each, x).split(G * HEAD, dim=1)] for each in (separate, whitened)
    )
    assert plain[0] < in_loss[0] and plain[1] < in_loss[1]


def test_channels_that_the_key_norm_removes_are_left_alone():
    layer = random_layer("normed")
    weight = layer.k_norm.weight.clone()
    weight[2] = 0
    layer = replace(layer, k_norm=replace(layer.k_norm, weight=weight))
    for method in ("fisher", "svd-llm"):
        converted = low_rank_layer(layer, swept(layer), blocks_for(method, layer, 36), method).layer
        assert all(part.isfinite().all() for part in (converted.down, converted.key_up, converted.value_up))
        # The square root of what rounding leaves of a zero in a second moment: 2e-9 on some CPUs, less on others.
        assert converted.key_up[:, 2].abs().max() < 1e-8 * converted.key_up.abs().max()


def test_latents_are_as_large_as_what_they_stand_for():
    layer = random_layer()
    statistics = swept(layer)
    converted = low_rank_layer(layer, statistics, blocks_for("fisher", layer, 12))
    x = inputs_of(layer)
    latents, whole = (x @ converted.layer.down.mT).flatten(0, 1), bias_free(layer, x)
    assert float(gradient_moment(latents, statistics).trace()) == pytest.approx(
        float(gradient_moment(whole, statistics).trace()), rel=1e-6
    )


# Named methods.

ones = partial(torch.ones, dtype=torch.float64)


@pytest.mark.parametrize(
    ("factors", "part"),
    [
        (None, "down"),
        (Factors(ones(4, 10), ones(10, 4).float(), ones(10)), "up"),
        (Factors(ones(10, 4), ones(10, 4), ones(10)), "down"),
        (Factors(ones(4, 10), ones(10, 4), ones(4)), "energy"),
    ],
)
def test_a_method_that_returns_other_factors_is_named(factors, part):
    check_factors("mine", Factors(ones(4, 10), ones(10, 4), ones(10)), 4, 10)
    with pytest.raises(SurgeryError, match=f"method mine: {part} must be float64 of shape"):
        check_factors("mine", factors, 4, 10)
    with pytest.raises(ValueError, match="layout 'xx' is unknown"):
        Method(lambda block, rank: None, layout="xx")


def test_palu_ranks_follow_the_fisher_information():
    layer = random_layer("normed")
    information = [(1.0, 3.0), (2.0, 6.0), (0.0, 4.0)]
    ranks = palu_ranks(information, layer, 33)
    assert ranks == [(2, 6), (4, 12), (1, 8)]


def test_fisher_information_is_the_size_of_weight_gradients():
    """Each token alone: the root mean square of ``g_i x_j``, where gradients have nothing to do with inputs."""
    layer = random_layer("normed")
    statistics = swept(layer)
    g, x = random(3, G * HEAD, seed=90), random(4, D, seed=91)
    both = torch.cat([g, 2 * g], dim=1)
    result = replace(statistics, raw_gradient=both.mT @ both / len(g), input_energy=x.square().mean(0))
    roots = torch.einsum("ti,sj->tsij", g, x).square().mean((0, 1)).sqrt()
    want = float(roots.mean())
    assert fisher_information(layer, result) == pytest.approx((want, 2 * want))
    weight = layer.k_norm.weight.repeat(G)
    values = replace(result, raw_gradient=None, gradient=result.raw_gradient)
    assert fisher_information(layer, values)[0] == pytest.approx(float((roots * weight[:, None]).mean()))


def test_palu_groups_up_to_four_heads():
    wide = replace(random_layer(), k=random(6, HEAD, D, seed=2), v=random(6, HEAD, D, seed=3))
    blocks = blocks_for("palu", wide, 30, key_rank=12)
    four, two = (0, 1, 2, 3), (4, 5)
    results = [(b.rank, b.keys, b.values) for b in blocks]
    assert results == [(8, four, ()), (4, two, ()), (12, (), four), (6, (), two)]


@pytest.mark.parametrize("method", METHODS)
def test_blocks_fit_every_budget(method):
    layer = random_layer()
    for rank in range(2, WIDTH + 1):
        blocks = blocks_for(method, layer, rank)
        assert sum(block.rank for block in blocks) == rank
        low_rank = [head for block in blocks for head in block.keys]
        assert sorted(low_rank) == list(range(G))


def test_methods_work_from_weights_alone():
    layer = random_layer("both")
    statistics = weight_statistics(layer, torch.ones(D, dtype=torch.float64))
    errors = {
        method: low_rank_layer(layer, statistics, blocks_for(method, layer, 36), method).error for method in METHODS
    }
    assert min(errors, key=errors.get) == "fisher" and errors["fisher"] > 0
    assert all(part > 0 for part in fisher_information(layer, statistics))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_alone_know_their_bias(kind):
    """White noise as input: what the stand-in predicts is what such inputs would lose."""
    layer = random_layer(kind)
    statistics = weight_statistics(layer, torch.ones(D, dtype=torch.float64))
    converted = low_rank_layer(layer, statistics, blocks_for("svd-llm", layer, 12), "svd-llm")
    error = unpredicted(converted, torch.eye(D, dtype=torch.float64)[None])
    both = loss_metric(layer, statistics) * (error.mT @ error)
    keys = G * HEAD
    want = [float(part.sum()) for part in (both[:keys, :keys], both[keys:, keys:], both)]
    assert [converted.key_error, converted.value_error, converted.error] == pytest.approx(want)


def test_refusals():
    layer = random_layer("biased")
    statistics = swept(layer)
    heads = tuple(range(G))
    with pytest.raises(SurgeryError, match="keys of each of 4 KV heads exactly once"):
        low_rank_layer(layer, statistics, (Block(4, (0, 1), heads),), "svd-llm")
    with pytest.raises(SurgeryError, match="1 to 24 latents for its 24 elements, not 30"):
        low_rank_layer(layer, statistics, (Block(30, heads, ()), Block(4, (), heads)), "svd-llm")
    with pytest.raises(SurgeryError, match="choose 1 to 48"):
        blocks_for("fisher", layer, 49)
    with pytest.raises(SurgeryError, match="ranks 3 for keys and 30 for values"):
        blocks_for("separate", layer, 33, key_rank=3)


def test_a_prefix_of_the_latents_is_the_smaller_layer():
    """Compare on real weights: the choices of rank 64 are the first 64 of rank 128, but for one factor."""
    layer = Source.open(DEMO, ConversionSettings()).anatomy(3).to(torch.float64)
    statistics = swept(layer)
    half, quarter = (low_rank_layer(layer, statistics, blocks_for("fisher", layer, rank)) for rank in (128, 64))
    assert half.error < quarter.error
    factor = half.layer.down[0].norm() / quarter.layer.down[0].norm()
    torch.testing.assert_close(half.layer.down[:64], quarter.layer.down * factor, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(half.layer.key_up[..., :64], quarter.layer.key_up / factor, rtol=1e-6, atol=1e-9)
