"""Ordered latents: the same layer, sorted by a measured Gauss-Newton metric, and prefixes that are good layers."""

from dataclasses import replace

import pytest
import torch
from random_layers import truncated

from surgery.common.errors import SurgeryError
from surgery.running.source import Source
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms.attention_fit import flat
from surgery.transforms.effort import Effort
from surgery.transforms.latent_fit import _Problem, _Weights, latent_moments
from surgery.transforms.latent_order import order_latents
from surgery.transforms.partial_rope import truncate

RANK = 12


def problem(checkpoints, name: str, sequences: int = 4):
    """A truncated layer in no order, inputs, and an output metric's root."""
    anatomy = Source.open(checkpoints(name), ConvertSettings()).anatomy(0).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sequences, 24, anatomy.hidden, generator=generator, dtype=torch.float64)
    form, down, up = truncated(anatomy, x, rotated=2, rank=RANK)
    mixing = torch.randn(RANK, RANK, generator=generator, dtype=torch.float64)
    layer = truncate(form, mixing @ down, up @ mixing.inverse())
    root = torch.randn(anatomy.hidden, anatomy.hidden, generator=generator, dtype=torch.float64)
    return layer, x, root


def moments(layer, x, root, seed=0):
    return latent_moments(layer, x, root @ root.T, Effort(queries=24, seed=seed))


def without(layer, dropped):
    """The layer with some latents unread."""
    query_up, value_up = layer.query_up.clone(), layer.value_up.clone()
    query_up[..., dropped] = 0
    value_up[..., dropped] = 0
    return replace(layer, query_up=query_up, value_up=value_up)


@pytest.mark.parametrize("name", ["llama", "llama_bias", "qwen3", "mistral_window"])
def test_ordering_changes_no_output_and_no_rotated_number(checkpoints, name):
    layer, x, root = problem(checkpoints, name)
    ordered, energies = order_latents(layer, *moments(layer, x, root))
    torch.testing.assert_close(ordered.forward(x), layer.forward(x), atol=1e-9, rtol=1e-9)
    assert torch.equal(ordered.down[RANK:], layer.down[RANK:])
    assert (energies.diff() <= 0).all() and energies[-1] >= 0
    assert not torch.allclose(ordered.down[:RANK], layer.down[:RANK])


def test_latents_become_uncorrelated_with_their_energies_as_variances(checkpoints):
    layer, x, root = problem(checkpoints, "llama_bias")
    moment, metric = moments(layer, x, root)
    latents = layer.compress(x)[0].flatten(0, 1)
    torch.testing.assert_close(moment, latents.T @ latents / len(latents))
    ordered, energies = order_latents(layer, moment, metric)
    latents = ordered.compress(x)[0].flatten(0, 1)
    found = latents.T @ latents / len(latents)
    torch.testing.assert_close(found, torch.diag(energies / energies.mean()), atol=1e-5, rtol=1e-5)
    # What it costs to lose the last latents is the sum of their energies: in the old basis, by its own moments.
    change = torch.linalg.lstsq(layer.down[:RANK].T, ordered.down[:RANK].T).solution.T
    lost = torch.diag(torch.arange(RANK).double() >= 5)
    back = change.inverse() @ lost.to(change) @ change
    assert float((back.T @ metric @ back * moment).sum()) == pytest.approx(float(energies[5:].sum()), rel=1e-6)


def test_random_probes_give_the_gauss_newton_matrix(checkpoints):
    layer, x, _ = problem(checkpoints, "qwen3", sequences=1)
    x, hidden = x[:, :6], x.shape[-1]
    identity = torch.eye(hidden, dtype=torch.float64)
    weights = _Weights.of(layer)
    block = _Problem(layer, x, identity).linearise(weights, 0, torch.arange(6))

    def latent_signals(out):
        return block.signals(out)[1][:, :RANK]

    probes = torch.eye(6 * hidden, dtype=torch.float64).view(-1, 6, hidden)
    exact = sum(signal.T @ signal for signal in map(latent_signals, probes)) / 6
    drawn = sum(moments(layer, x, identity, seed)[1] for seed in range(300)) / 300
    assert float((drawn - exact).norm() / exact.norm()) < 0.1
    # The signal is the derivative: of what a change of the latent, through the down projection, does to the output.
    generator = torch.Generator().manual_seed(1)
    down = torch.zeros_like(weights.down)
    down[:RANK] = torch.randn(RANK, down.shape[1], generator=generator).double()
    change = weights._make(down if weight is weights.down else torch.zeros_like(weight) for weight in weights)
    out = torch.randn(6, hidden, generator=generator, dtype=torch.float64)
    moved = block.x @ down[:RANK].T
    assert float((latent_signals(out) * moved).sum()) == pytest.approx(float((block.jvp(flat(change)) * out).sum()))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_prefix_beats_random_subsets(checkpoints, name):
    layer, x, root = problem(checkpoints, name)
    ordered, _ = order_latents(layer, *moments(layer, x, root))
    exact = layer.forward(x)

    def error(dropped, form=ordered):
        return float(((without(form, dropped).forward(x) - exact) @ root).square().sum())

    generator = torch.Generator().manual_seed(3)
    for kept in (4, 8):
        prefix = error(list(range(kept, RANK)))
        others = [torch.randperm(RANK, generator=generator)[kept:].tolist() for _ in range(20)]
        assert all(prefix <= error(dropped) for dropped in others)
        assert prefix < 0.9 * min(error(dropped, layer) for dropped in others)


def test_a_matrix_of_another_size_is_refused(checkpoints):
    layer, *others = problem(checkpoints, "llama")
    moment, metric = moments(layer, *others)
    with pytest.raises(SurgeryError, match="this layer has 12 latents"):
        order_latents(layer, moment, metric[1:, 1:])
