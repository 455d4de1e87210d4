"""The rotation: orthogonal, evenly spread, and without effect on what a layer computes."""

import pytest
import torch

from surgery.transforms.hadamard import hadamard, rotate_latent, rotate_values


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [1, 2, 3, 32, 80, 88, 97, 256])
def test_orthogonal_and_spread(size):
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    odd = size // (size & -size)
    # A power of two spreads a channel perfectly evenly, the cosines of the rest to within a factor of √2.
    assert matrix.abs().max() <= (2**0.5 if odd > 1 else 1) * size**-0.5 + 1e-12


def test_sylvesters_matrix():
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64) / 2
    torch.testing.assert_close(hadamard(4), expected, rtol=0, atol=1e-15)


def test_no_size():
    with pytest.raises(ValueError, match="at least 1"):
        hadamard(0)


@pytest.mark.parametrize("head_dim", [8, 12])
@pytest.mark.parametrize("biased", [False, True])
def test_values_compute_the_same(head_dim, biased):
    v, o, x = random(2, head_dim, 16), random(16, 6, head_dim), random(5, 16)
    bias = random(2, head_dim) if biased else None

    def outputs(v, o, bias):
        value = torch.einsum("gdx,tx->tgd", v, x) + (0 if bias is None else bias)
        return torch.einsum("thd,yhd->ty", value.repeat_interleave(3, dim=1), o)

    rotated = rotate_values(v, o, bias)
    assert not torch.allclose(rotated[0], v) and (rotated[2] is None) != biased
    torch.testing.assert_close(outputs(*rotated), outputs(v, o, bias), rtol=1e-9, atol=1e-9)


def test_a_latent_is_read_as_before():
    down, bias, ups, x = random(22, 16), random(22), [random(4, 8, 22), random(7, 22)], random(16)
    new_down, new_ups, new_bias = rotate_latent(down, ups, bias)
    for up, new_up in zip(ups, new_ups, strict=True):
        torch.testing.assert_close(new_up @ (new_down @ x + new_bias), up @ (down @ x + bias), rtol=1e-9, atol=1e-9)
    assert rotate_latent(down, ups)[2] is None


def test_an_outlier_is_spread():
    values = random(1, 32, 32)
    values[:, 3] *= 100
    rotated, _, _ = rotate_values(values, random(32, 1, 32))
    before, after = values[0].norm(dim=1), rotated[0].norm(dim=1)
    assert before.max() / before.median() > 50 and after.max() / after.median() < 2
