"""The Gauss-Newton fit: its products with J and Jᵀ are right, and it only ever improves."""

import pytest
import torch
from random_layers import truncated
from tiny_models import FAMILIES

from surgery.families import attention
from surgery.running.source import Source
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms.attention_fit import flat, unflat
from surgery.transforms.effort import Effort
from surgery.transforms.key_basis import energy_basis
from surgery.transforms.latent_fit import _Problem, _Weights, fit_latent_layer
from surgery.transforms.partial_rope import latent_form, truncate


def problem(checkpoints, name: str):
    """A truncated layer, its inputs, and what the whole layer puts out."""
    opened = Source.open(checkpoints(name), ConvertSettings())
    anatomy = opened.anatomy(opened.first_layer).to(torch.float64)
    x = torch.randn(4, 30, anatomy.hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer = truncate(*truncated(anatomy, x, rotated=3, rank=8))
    mixed = anatomy.gated(attention.attend(anatomy, anatomy.project(x)), x)
    targets = torch.einsum("bthe,xhe->btx", mixed, anatomy.o)
    return layer, x, targets


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_5_state"])
def test_jvp_is_the_derivative_and_vjp_its_transpose(checkpoints, name):
    layer, x, _ = problem(checkpoints, name)
    positions, step = torch.arange(2, 28, 3), 1e-6
    here, generator = flat(_Weights.of(layer)), torch.Generator().manual_seed(1)
    change = torch.randn(len(here), generator=generator, dtype=torch.float64)
    root = torch.randn(x.shape[-1], x.shape[-1], generator=generator, dtype=torch.float64)

    def linearised(vector):
        return _Problem(layer, x, root).linearise(unflat(vector, _Weights.of(layer)), 1, positions)

    sequence = linearised(here)
    wanted = torch.einsum("bthe,xhe->btx", layer.source.gated(layer.attend(x), x), layer.o)[1, positions] @ root
    torch.testing.assert_close(sequence.out.value(), wanted, atol=1e-9, rtol=1e-9)
    difference = linearised(here + step * change).out.value() - linearised(here - step * change).out.value()
    product = sequence.jvp(change)
    torch.testing.assert_close(product, difference / (2 * step), atol=1e-5, rtol=1e-5)
    out = torch.randn(product.shape, generator=generator, dtype=torch.float64)
    assert float((product * out).sum()) == pytest.approx(float(sequence.vjp(out) @ change), rel=1e-9)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral_window"])
def test_the_fit_improves_and_reports_the_error_that_it_leaves(checkpoints, name):
    layer, x, targets = problem(checkpoints, name)
    metric = torch.eye(x.shape[-1], dtype=torch.float64)

    def error(form):
        out = torch.einsum("bthe,xhe->btx", form.attend(x), form.o)
        return float((out - targets).square().sum() / targets.square().sum())

    fitted, _, after = fit_latent_layer(layer, x, targets, metric, Effort(3, 8, 30))
    assert error(fitted) < 0.8 * error(layer)
    assert error(fitted) == pytest.approx(after, rel=1e-6)
    assert (fitted.rank, fitted.rope_dim) == (layer.rank, layer.rope_dim)


def test_an_exact_layer_stays_exact(checkpoints):
    anatomy = Source.open(checkpoints("llama"), ConvertSettings()).anatomy(0).to(torch.float64)
    x = torch.randn(2, 20, anatomy.hidden, dtype=torch.float64)
    basis = energy_basis(torch.eye(16, dtype=torch.float64).view(2, 8, 2, 8), None)
    layer = latent_form(anatomy, basis, torch.arange(basis.components))
    targets = layer.forward(x)
    metric = torch.eye(anatomy.hidden, dtype=torch.float64)
    fitted, before, after = fit_latent_layer(layer, x, targets, metric, Effort(1, 4))
    assert before < 1e-20 and after < 1e-20
    torch.testing.assert_close(fitted.forward(x), targets, atol=1e-8, rtol=1e-8)
