"""The basis of a group: best of its rank, its error the predicted one; and the simulation of shared caches."""

import pytest
import torch

from surgery.calibration.statistics import LayerStatistics
from surgery.families.anatomy import AttentionAnatomy, HeadNorm
from surgery.families.attention import attend, output
from surgery.transforms.algebra import damp
from surgery.transforms.cross_layer import SimulatedGroup, loss_metric, shared_basis

LAYERS, WIDTH, TOKENS = 3, 8, 400


@pytest.fixture
def group():
    """Stacked tokens of layers that have much in common [tokens, W·n], and a metric for each layer."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = randn(TOKENS, 5) @ randn(5, LAYERS * WIDTH) + 0.2 * randn(TOKENS, LAYERS * WIDTH)
    metrics = [damp(part.mT @ part, 1e-6) for part in randn(LAYERS, 2 * WIDTH, WIDTH)]
    return tokens, metrics


def loss(tokens, rebuilt, metrics) -> float:
    """Σ_i ‖M_i^{1/2} (z_i - ẑ_i)‖² per token."""
    parts = zip((tokens - rebuilt).chunk(LAYERS, dim=1), metrics, strict=True)
    return float(sum((part @ metric * part).sum() for part, metric in parts)) / len(tokens)


@pytest.mark.parametrize("rank", [1, 5, LAYERS * WIDTH])
def test_the_predicted_error_is_the_measured_one(group, rank):
    tokens, metrics = group
    basis = shared_basis(tokens.mT @ tokens / TOKENS, metrics, rank)
    rebuilt = torch.cat(basis.rebuild(list(tokens.chunk(LAYERS, dim=1))), dim=1)
    assert [part.shape for part in basis.down] == [(rank, WIDTH)] * LAYERS
    assert [part.shape for part in basis.up] == [(WIDTH, rank)] * LAYERS
    loss_increase, whole = loss(tokens, rebuilt, metrics), loss(tokens, 0 * tokens, metrics)
    assert loss_increase == pytest.approx(float(basis.energy[rank:].sum()), rel=1e-6, abs=1e-7)
    assert loss_increase / whole == pytest.approx(basis.error, rel=1e-6, abs=1e-9)


def test_the_metric_is_at_keys_before_their_norm():
    moments = [torch.eye(4, dtype=torch.float64) * scale for scale in (1, 2, 3)]
    statistics = LayerStatistics(moments[0], moments[1], torch.ones(1), torch.ones(1), 1)
    assert float(loss_metric(statistics)[0, 0]) == pytest.approx(2, rel=1e-5)
    statistics.raw_gradient = moments[2]
    assert float(loss_metric(statistics)[0, 0]) == pytest.approx(3, rel=1e-5)


def anatomy(seed: int) -> AttentionAnatomy:
    """Four query heads, two KV heads of 4 dimensions, every bias and norm there."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    return AttentionAnatomy(
        q=randn(4, 4, 12),
        k=randn(2, 4, 12),
        v=randn(2, 4, 12),
        o=randn(12, 4, 4),
        inv_freq=torch.tensor([1.0, 0.1], dtype=torch.float64),
        scale=0.5,
        k_bias=randn(2, 4),
        v_bias=randn(2, 4),
        q_norm=HeadNorm(randn(4) + 1, 1e-6),
        k_norm=HeadNorm(randn(4) + 1, 1e-6),
    )


def apply(hidden, members):
    for member in members:
        hidden = hidden + member(hidden)[0]
    return hidden


def exact(sources, hidden):
    for source in sources:
        hidden = hidden + output(source, attend(source, source.project(hidden)), hidden)
    return hidden


@pytest.mark.parametrize("tokens", [3, 8, 14])
def test_a_simulation_that_rebuilds_without_loss_is_the_source(tokens):
    sources = [anatomy(seed) for seed in range(2)]
    hidden = torch.randn(2, tokens, 12, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    group = SimulatedGroup.of(sources, lambda blocks: blocks, 4, sinks=1, window=3)
    assert torch.allclose(group.run(apply, hidden), exact(sources, hidden), atol=1e-12)
    assert group.errors() == (0, 0)


def test_what_is_rebuilt_is_read_by_no_query_that_should_read_exactly():
    sources = [anatomy(seed) for seed in range(2)]
    hidden = torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def first_difference(**settings) -> int:
        group = SimulatedGroup.of(sources, lambda blocks: [0 * block for block in blocks], 4, **settings)
        difference = (group.run(apply, hidden) - exact(sources, hidden)).abs().amax(-1)[0] > 1e-9
        return int(difference.int().argmax()) if difference.any() else -1

    assert first_difference() == 4
    assert first_difference(window=7) == 7  # the first token leaves the window
    assert first_difference(window=7, sinks=2) == 9
    assert first_difference(window=12) == first_difference(sinks=12) == -1
