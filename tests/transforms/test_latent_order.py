"""Ordered latents: the same layer, sorted by a measured Gauss-Newton metric, and prefixes that are good layers."""

from dataclasses import replace

import pytest
import torch

from surgery.common.errors import SurgeryError
from surgery.running.source import Source
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms.algebra import reduced_rank_projection
from surgery.transforms.key_basis import energy_basis
from surgery.transforms.latent_order import order_latents
from surgery.transforms.least_squares import Block, LatentFit
from surgery.transforms.partial_rope import latent_form, latent_rows, truncate

RANK = 12


def problem(checkpoints, name: str, sequences: int = 4, **settings):
    """A truncated layer in no order, inputs, and the fit whose moments order it."""
    anatomy = Source.open(checkpoints(name), ConvertSettings()).anatomy(0).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sequences, 24, anatomy.hidden, generator=generator, dtype=torch.float64)
    projection = anatomy.project(x)
    z = torch.cat([projection.k.flatten(2), projection.v.flatten(2)], dim=-1).flatten(0, 1)
    groups, dim = anatomy.kv_heads, anatomy.head_dim
    moment = z.T @ z / len(z)
    basis = energy_basis(moment[: groups * dim, : groups * dim].view(groups, dim, groups, dim), None)
    rotated = torch.arange(2)
    rows = latent_rows(anatomy, basis, rotated)
    down, up, _ = reduced_rank_projection(rows @ moment @ rows.T, torch.eye(len(rows), dtype=torch.float64), RANK)
    mixing = torch.randn(RANK, RANK, generator=generator, dtype=torch.float64)
    layer = truncate(latent_form(anatomy, basis, rotated), mixing @ down, up @ mixing.inverse())
    root = torch.randn(anatomy.hidden, anatomy.hidden, generator=generator, dtype=torch.float64)
    settings = {"queries": 24, **settings}
    fit = LatentFit(layer, x, torch.zeros_like(x), root @ root.T, **settings)
    layer, _, _ = fit.run(0, 1)
    return layer, x, fit


def without(layer, dropped):
    """The layer with some latents unread."""
    query_up, value_up = layer.query_up.clone(), layer.value_up.clone()
    query_up[..., dropped] = 0
    value_up[..., dropped] = 0
    return replace(layer, query_up=query_up, value_up=value_up)


@pytest.mark.parametrize("name", ["llama", "llama_bias", "qwen3", "mistral_window"])
def test_ordering_changes_no_output_and_no_rotated_number(checkpoints, name):
    layer, x, fit = problem(checkpoints, name)
    ordered, energies = order_latents(layer, *fit.latent_moments())
    torch.testing.assert_close(ordered.forward(x), layer.forward(x), atol=1e-9, rtol=1e-9)
    assert torch.equal(ordered.down[RANK:], layer.down[RANK:])
    assert (energies.diff() <= 0).all() and energies[-1] >= 0
    assert not torch.allclose(ordered.down[:RANK], layer.down[:RANK])


def test_latents_become_uncorrelated_with_their_energies_as_variances(checkpoints):
    layer, x, fit = problem(checkpoints, "llama_bias")
    moment, metric = fit.latent_moments()
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
    _, x, fit = problem(checkpoints, "qwen3", sequences=1, queries=6)
    positions = torch.tensor([3, 9, 14, 15, 20, 23])
    fit._sample = lambda: [Block(0, positions)]
    block = fit._linearise(fit.parameters, fit._sample()[0])
    exact = torch.zeros(RANK, RANK, dtype=torch.float64)
    for place in range(6):
        for channel in range(x.shape[-1]):
            out = torch.zeros(6, x.shape[-1], dtype=torch.float64)
            out[place, channel] = 1
            signal = block.latent_signals(out)
            exact += signal.T @ signal / 6
    drawn = sum(fit.latent_moments()[1] for _ in range(300)) / 300
    assert float((drawn - exact).norm() / exact.norm()) < 0.1
    # The signal is the derivative: of what a change of the latent, through the down projection, does to the output.
    change = replace_down(fit.parameters)
    out = torch.randn(6, x.shape[-1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moved = block.x @ change.down[:RANK].T
    assert float((block.latent_signals(out) * moved).sum()) == pytest.approx(float((block.jvp(change) * out).sum()))


def replace_down(parameters):
    """A change of the latents' rows alone."""
    zeros = [torch.zeros_like(tensor) for tensor in parameters.tensors()]
    zeros[0][:RANK] = torch.randn(RANK, zeros[0].shape[1], generator=torch.Generator().manual_seed(1)).double()
    return type(parameters)(*zeros)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_prefix_beats_random_subsets(checkpoints, name):
    layer, x, fit = problem(checkpoints, name)
    ordered, _ = order_latents(layer, *fit.latent_moments())
    exact = layer.forward(x)

    def error(dropped, form=ordered):
        return float(((without(form, dropped).forward(x) - exact) @ fit._root).square().sum())

    generator = torch.Generator().manual_seed(3)
    for kept in (4, 8):
        prefix = error(list(range(kept, RANK)))
        others = [torch.randperm(RANK, generator=generator)[kept:].tolist() for _ in range(20)]
        assert all(prefix <= error(dropped) for dropped in others)
        assert prefix < 0.9 * min(error(dropped, layer) for dropped in others)


def test_a_matrix_of_another_size_is_refused(checkpoints):
    layer, _, fit = problem(checkpoints, "llama")
    moment, metric = fit.latent_moments()
    with pytest.raises(SurgeryError, match="this layer has 12 latents"):
        order_latents(layer, moment, metric[1:, 1:])
