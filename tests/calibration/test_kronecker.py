"""The factors are those of the tokens at large, whatever a few of them carry."""

import pytest
import torch

from surgery.calibration import kronecker
from surgery.calibration.kronecker import kronecker_factors, weighted_moment


def drawn(count, *sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, size, generator=generator, dtype=torch.float64) for size in sizes]


def distance(result, want):
    return float((result / result.trace() - want / want.trace()).norm() / (want / want.trace()).norm())


def test_independent_tokens_give_plain_moments():
    z, g = drawn(20_000, 6, 5)
    z, g = z * torch.arange(1, 7), g * torch.arange(1, 6)
    factors = kronecker_factors([z.split(700)], [g.split(700)])
    assert distance(factors.moment, z.T @ z) < 0.03 and distance(factors.gradient, g.T @ g) < 0.03
    energy = (z.square().sum(1) * g.square().sum(1)).mean()
    assert float(factors.moment.trace() * factors.gradient.trace() / energy) == pytest.approx(1, abs=0.05)
    assert float(factors.token_weights[0].mean()) == pytest.approx(1)


def test_a_few_tokens_do_not_speak_for_all():
    """One token of a hundred with a gradient a thousand times as large, in one direction, and keys of its own."""
    z, g = drawn(20_000, 6, 5)
    z, g = z * torch.arange(1, 7), g * torch.arange(1, 6)
    want_z, want_g = z.T @ z, g.T @ g
    z[::100], g[::100] = 0, 0
    z[::100, 0], g[::100, 0] = 40.0, 1000.0
    factors = kronecker_factors([[z]], [[g]])
    weight = g.square().sum(1)
    plain = z.T @ (z * weight[:, None]), g.T @ g
    rest = slice(1, None)
    for result, want, dominated in ((factors.moment, want_z, plain[0]), (factors.gradient, want_g, plain[1])):
        assert distance(result[rest, rest], want[rest, rest]) < 0.05
        ordinary, of_averages = (1 - float(matrix[0, 0] / matrix.trace()) for matrix in (result, dominated))
        assert ordinary > 2 * of_averages


def test_the_likelihood_is_stationary_where_sweeps_end(monkeypatch):
    monkeypatch.setattr(kronecker, "DAMPING", 0.0)
    z, g = drawn(400, 6, 5, seed=1)
    g = g * (1 + z[:, :1].abs())  # not independent
    factors = kronecker_factors([[z]], [[g]], sweeps=50)
    weight = ((g @ factors.gradient.inverse()) * g).sum(1) / 5
    torch.testing.assert_close(weighted_moment([[z]], [weight]), factors.moment, rtol=1e-8, atol=1e-10)
    weight = ((z @ factors.moment.inverse()) * z).sum(1) / 6
    torch.testing.assert_close(weighted_moment([[g]], [weight]), factors.gradient, rtol=1e-8, atol=1e-10)


def test_nothing_to_learn_from_zeros():
    (z,) = drawn(10, 4)
    assert kronecker_factors([[z]], [[torch.zeros_like(z)]]) is None
    assert kronecker_factors([[torch.zeros_like(z)]], [[z]]) is None


def test_a_moment_that_is_known_is_not_taken_again(monkeypatch):
    z, g = drawn(400, 6, 5)
    want, calls = kronecker_factors([[z]], [[g]]), []
    original = kronecker.weighted_moment
    monkeypatch.setattr(kronecker, "weighted_moment", lambda *of, **by: calls.append(of) or original(*of, **by))
    result = kronecker_factors([[z]], [[g]], original([[g]]))
    assert torch.equal(result.moment, want.moment) and torch.equal(result.gradient, want.gradient)
    assert len(calls) == 2 * kronecker.SWEEPS
