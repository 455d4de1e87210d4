"""Refit of output projections: ridge regression of the source's outputs on converted head outputs."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from surgery.transforms.output_refit import refit_output

WIDTH, HEADS, DIM = 6, 2, 3


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def outputs(o: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bthe,dhe->btd", heads, o)


@given(st.integers(0, 99), st.integers(1, 60))
def test_equal_heads_keep_the_projection(seed, tokens):
    o, heads = draw(seed, WIDTH, HEADS, DIM), draw(seed + 1, 2, tokens, HEADS, DIM)
    new = refit_output(o, [(outputs(o, heads), heads)])
    assert torch.allclose(new, o, atol=1e-9)


@given(st.integers(0, 99), st.integers(1, 60))
def test_it_is_the_minimum_of_error_and_change(seed, tokens):
    o, heads = draw(seed, WIDTH, HEADS, DIM), draw(seed + 1, 2, tokens, HEADS, DIM)
    y = outputs(o, heads) + 0.5 * draw(seed + 2, 2, tokens, WIDTH)
    noisy = heads + 0.5 * draw(seed + 3, *heads.shape)
    new = refit_output(o, [(y[:1], noisy[:1]), (y[1:], noisy[1:])]).requires_grad_()
    ridge = noisy.square().sum() / (2 * tokens)  # λ of the docstring, for sums over tokens instead of means
    ((y - outputs(new, noisy)).square().sum() + ridge * (new - o).square().sum()).backward()
    assert torch.allclose(new.grad, torch.zeros_like(new), atol=1e-8)


def test_a_linear_change_of_the_heads_is_undone_with_enough_tokens():
    o, heads, change = draw(0, WIDTH, HEADS, DIM), draw(1, 8, 4000, HEADS, DIM), torch.eye(HEADS * DIM).double()
    change += 0.3 * draw(2, *change.shape)
    changed = (heads.flatten(-2) @ change).view_as(heads)
    new = refit_output(o, [(outputs(o, heads), changed)])
    error = (outputs(new, changed) - outputs(o, heads)).norm() / outputs(o, heads).norm()
    assert error < 0.01 < (outputs(o, changed) - outputs(o, heads)).norm() / outputs(o, heads).norm()
