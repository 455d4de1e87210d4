"""Merging KV heads: exact where heads are alike, predicted where they are not, and a stock checkpoint in the end."""

from dataclasses import replace

import pytest
import torch
from random_layers import random, random_attention
from tiny_models import FAMILIES
from torch import Tensor

from surgery.calibration.kronecker import kronecker_factors
from surgery.calibration.statistics import LayerStatistics, MomentAccumulator
from surgery.common.errors import SurgeryError
from surgery.families import attention
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.rope import phases, rotate, to_complex, to_real
from surgery.running.source import Source
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms.head_grouping import cheapest_groups, partition_count, partitions, reorder_kv_heads
from surgery.transforms.key_norm import deal_queries, pad_groups, padded_group, pooled_key_norms
from surgery.transforms.kv_heads import METHODS, merge_kv_heads

pytestmark = pytest.mark.usefixtures("one_core")

H, G, D, HEAD = 8, 4, 32, 6
PAIRS = ((0, 2), (1, 3))


def layer_of(checkpoints, name: str) -> AttentionAnatomy:
    return Source.open(checkpoints(name), ConvertSettings()).anatomy(0).to(torch.float64)


def random_layer(*, biased: bool = True) -> AttentionAnatomy:
    """Four KV heads that have nothing in common."""
    return random_attention(H, G, D, HEAD, biased=biased)


def mergeable_layer(*, biased: bool = True) -> AttentionAnatomy:
    """Heads 2 and 3 are heads 0 and 1 times complex factors per frequency, and after a matrix for the values."""
    layer = random_layer(biased=biased)
    factor = torch.complex(random(2, HEAD // 2, seed=8), random(2, HEAD // 2, seed=9))
    matrix = random(2, HEAD, HEAD, seed=10)
    changed = {
        "k": torch.cat([layer.k[:2], to_real(to_complex(layer.k[:2].mT) * factor[:, None]).mT]),
        "v": torch.cat([layer.v[:2], matrix @ layer.v[:2]]),
    }
    if biased:
        changed["k_bias"] = torch.cat([layer.k_bias[:2], to_real(to_complex(layer.k_bias[:2]) * factor)])
        changed["v_bias"] = torch.cat([layer.v_bias[:2], (matrix @ layer.v_bias[:2, :, None])[..., 0]])
    return replace(layer, **changed)


def inputs_of(layer: AttentionAnatomy, seed: int = 20) -> Tensor:
    return random(3, 40, layer.hidden, seed=seed) + random(layer.hidden, seed=seed + 1)


def gradients_of(layer: AttentionAnatomy, x: Tensor) -> tuple[Tensor, Tensor]:
    """Stand-ins for loss gradients at keys and values that are correlated and not all alike."""
    groups, dim = layer.kv_heads, layer.head_dim
    mixture = (x**2) @ random(layer.hidden, 2 * groups * dim, seed=30)
    k, v = mixture.unflatten(-1, (2, groups, dim)).unbind(-3)
    return k, v * torch.linspace(0.1, 2, dim)


def statistics_of(layer: AttentionAnatomy, *, gradients: bool = True) -> LayerStatistics:
    x = inputs_of(layer)
    projection, moments = layer.project(x), MomentAccumulator(layer, gradients=gradients)
    if gradients:
        for tensor, gradient in zip((projection.k, projection.v), gradients_of(layer, x), strict=True):
            tensor.grad = gradient
    moments.add(projection)
    return moments.result()


def output(layer: AttentionAnatomy, x: Tensor) -> Tensor:
    return attention.output(layer, attention.attend(layer, layer.project(x)), x)


def scores(layer: AttentionAnatomy, x: Tensor, positions: Tensor) -> Tensor:
    """Logits [B, H, T, T] of tokens at any positions."""
    projection, phase = layer.project(x), phases(layer.inv_freq, positions, x.dtype)
    q, k = rotate(projection.q, phase), rotate(projection.k, phase)
    return torch.einsum("bmhd,bnhd->bhmn", q, k.repeat_interleave(layer.heads // layer.kv_heads, dim=2))


def query_order(groups) -> Tensor:
    repeat = H // G
    return torch.tensor([head * repeat + i for group in groups for head in group for i in range(repeat)])


@pytest.mark.parametrize("biased", [True, False])
def test_heads_that_are_alike_merge_exactly(biased):
    layer = mergeable_layer(biased=biased)
    layer = replace(layer, sinks=random(H, seed=70)) if biased else layer  # as gpt-oss has both
    merged = merge_kv_heads(layer, statistics_of(layer), 2)
    assert merged.groups == PAIRS
    assert (merged.anatomy.kv_heads, merged.anatomy.heads) == (2, H)
    assert (merged.anatomy.k_bias is not None) == biased
    assert merged.key_error == pytest.approx(0, abs=1e-9)
    assert merged.value_error == pytest.approx(0, abs=1e-9)
    x = inputs_of(layer, seed=50)  # not what the statistics were taken on
    torch.testing.assert_close(output(merged.anatomy, x), output(layer, x), atol=1e-9, rtol=1e-9)
    positions = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[: x.shape[1]]
    expected = scores(layer, x, positions)[:, query_order(PAIRS)]
    torch.testing.assert_close(scores(merged.anatomy, x, positions), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_the_predicted_error_is_the_measured_one(method, kv_heads):
    """Compare the merged weights' reading of shared heads with the source's."""
    layer = random_layer()
    statistics = statistics_of(layer)
    merged = merge_kv_heads(layer, statistics, kv_heads, method)
    x = inputs_of(layer)
    source, short = layer.project(x), merged.anatomy.project(x)
    both = [
        torch.cat([k.flatten(2), v.flatten(2)], dim=-1).flatten(0, 1)
        for k, v in ((source.k, source.v), gradients_of(layer, x))
    ]
    factors = kronecker_factors(*([[rows]] for rows in both))
    weight, gradient_weight = factors.token_weights[0], factors.gradient_weights[0]  # tokens count by what they meet
    order, repeat = query_order(merged.groups), H // G
    heads = torch.tensor(sum(merged.groups, ()))
    # q' = conj(up) q in the first query head of each KV head; o' = o up.
    factor = to_complex(merged.anatomy.q[::repeat, :, 0]) / to_complex(layer.q[order][::repeat, :, 0])
    value_up = torch.linalg.lstsq(
        layer.o[:, order][:, ::repeat].transpose(0, 1), merged.anatomy.o[:, ::repeat].transpose(0, 1)
    ).solution
    size = G // kv_heads
    key = to_complex(short.k).repeat_interleave(size, dim=2) * factor.conj() - to_complex(source.k[:, :, heads])
    value = torch.einsum("hef,bthf->bthe", value_up, short.v.repeat_interleave(size, dim=2)) - source.v[:, :, heads]
    key_gradient, value_gradient = (gradient[:, :, heads] for gradient in gradients_of(layer, x))
    key_error = value_error = 0.0
    for first in range(0, G, size):
        group = slice(first, first + size)
        g, delta = to_complex(key_gradient[:, :, group]).flatten(0, 1), key[:, :, group].flatten(0, 1)
        metric = torch.einsum("tgl,thl,t->lgh", g, g.conj(), gradient_weight + 0j) / len(g)
        key_error += 0.5 * torch.einsum("tgl,lgh,thl,t->", delta.conj(), metric, delta, weight + 0j).real / weight.sum()
        g, delta = value_gradient[:, :, group].flatten(2).flatten(0, 1), value[:, :, group].flatten(2).flatten(0, 1)
        value_error += (
            ((delta @ (g.T @ (g * gradient_weight[:, None])) * delta).sum(1) * weight).sum() / len(g) / weight.sum()
        )
    assert merged.key_error == pytest.approx(float(key_error), rel=1e-6)
    assert merged.value_error == pytest.approx(float(value_error), rel=1e-6)


def test_without_gradients_errors_are_shares():
    layer = random_layer()
    merged = merge_kv_heads(layer, statistics_of(layer, gradients=False), 2)
    plain = merge_kv_heads(layer, statistics_of(layer, gradients=False), 2, "kv-heads")
    assert 0 < merged.key_error + merged.value_error < plain.key_error + plain.value_error < 2
    exact = mergeable_layer()
    merged = merge_kv_heads(exact, statistics_of(exact, gradients=False), 2)
    x = inputs_of(exact, seed=50)
    assert merged.groups == PAIRS
    torch.testing.assert_close(output(merged.anatomy, x), output(exact, x), atol=1e-9, rtol=1e-9)


def test_mean_pool_is_the_plain_mean_of_neighbors():
    layer = random_layer()
    merged = merge_kv_heads(layer, statistics_of(layer), 2, "mean-pool").anatomy
    torch.testing.assert_close(merged.k, layer.k.unflatten(0, (2, 2)).mean(1))
    torch.testing.assert_close(merged.v_bias, layer.v_bias.unflatten(0, (2, 2)).mean(1))
    torch.testing.assert_close(merged.q, layer.q)
    torch.testing.assert_close(merged.o, layer.o)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_of_heads_does_not_matter(checkpoints, name):
    layer = layer_of(checkpoints, name)
    x = inputs_of(layer)
    reordered = reorder_kv_heads(layer, (1, 0))
    assert not torch.equal(reordered.q, layer.q)
    torch.testing.assert_close(output(reordered, x), output(layer, x), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("heads", "size"), [(4, 2), (6, 3), (8, 2), (8, 4), (5, 1), (3, 3)])
def test_partitions_are_all_there_once(heads, size):
    results = list(partitions(tuple(range(heads)), size))
    assert len(results) == len(set(results)) == partition_count(heads, size)
    assert all(sorted(sum(groups, ())) == list(range(heads)) for groups in results)


@pytest.mark.parametrize(("heads", "size"), [(4, 2), (8, 4), (16, 2), (16, 4), (12, 6)])
def test_grouping_finds_planted_groups(heads, size):
    """Exactly and by exchange: heads of one label are close, those of others far, at distances that differ."""
    label = torch.randperm(heads, generator=torch.Generator().manual_seed(heads + size)) // size
    noise = torch.rand(heads, heads, generator=torch.Generator().manual_seed(0))

    def cost(group):
        return sum(float(noise[a, b] + 2 * (label[a] != label[b])) for a in group for b in group if a < b)

    for group in cheapest_groups(heads, size, cost):
        assert len(set(label[list(group)].tolist())) == 1


def test_grouping_by_exchange_is_near_the_best():
    """Eight pairs of random costs, where greedy alone takes dear leftovers."""
    cost = torch.rand(10, 10, generator=torch.Generator().manual_seed(1)).tolist()

    def summed(groups):
        return sum(cost[a][b] for a, b in groups)

    best = min(map(summed, partitions(tuple(range(10)), 2)))
    assert partition_count(10, 2) > 105  # beyond what is tried exhaustively
    assert summed(cheapest_groups(10, 2, lambda pair: cost[pair[0]][pair[1]])) <= 1.25 * best


def test_refusals(checkpoints):
    layer = random_layer()
    statistics = statistics_of(layer)
    for kv_heads in (0, 3, 4, 8):
        with pytest.raises(SurgeryError, match="choose a smaller number"):
            merge_kv_heads(layer, statistics, kv_heads)
    with pytest.raises(SurgeryError, match="choose fisher, kv-heads"):
        merge_kv_heads(layer, statistics, 2, "average")
    normed = layer_of(checkpoints, "qwen3")
    with pytest.raises(SurgeryError, match="q/k-norm"):
        merge_kv_heads(normed, statistics, 1)


def test_query_heads_are_dealt_by_norms_of_the_pooled_keys():
    assert deal_queries(torch.tensor([3.0, 1.0]), 8) == [6, 2]
    assert deal_queries(torch.tensor([100.0, 1.0]), 8) == [7, 1]
    assert deal_queries(torch.tensor([1.0, 1.0, 1.0, 1.0]), 8) == [2, 2, 2, 2]
    with pytest.raises(SurgeryError):
        deal_queries(torch.ones(4), 3)
    layer, kv_heads = random_layer(), 2
    keys = layer.project(inputs_of(layer)).k.unflatten(2, (kv_heads, -1)).mean(3)
    expected = keys.square().sum(-1).mean((0, 1)).sqrt()
    torch.testing.assert_close(pooled_key_norms(layer, statistics_of(layer), kv_heads), expected)


def test_padded_groups_compute_what_unequal_groups_do_and_divide_the_hidden_size():
    layer = replace(random_layer(), sinks=random(H, seed=70))
    pooled = merge_kv_heads(layer, statistics_of(layer), 2, "mean-pool").anatomy
    counts = [6, 2]
    padded = pad_groups(pooled, counts, 7)
    assert (padded.heads, padded.kv_heads) == (14, 2)
    # Every query head with a copy of the key and value that it reads.
    repeat = torch.tensor(counts)
    copies = {name: getattr(pooled, name).repeat_interleave(repeat, dim=0) for name in ("k", "v", "k_bias", "v_bias")}
    x = inputs_of(pooled, seed=50)
    torch.testing.assert_close(output(padded, x), output(replace(pooled, **copies), x))
    assert (output(padded, x) - output(pooled, x)).abs().max() > 1e-3
    assert padded_group(6, 2, 32) == 8
    assert padded_group(4, 2, 32) == 4
    with pytest.raises(SurgeryError, match="exceed the hidden size"):
        padded_group(20, 2, 32)
