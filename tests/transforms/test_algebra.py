"""Linear algebra of the transforms against brute force."""

import torch

from surgery.transforms.algebra import damp, left_root, psd_powers, reduced_rank_projection


def random_psd(n: int, seed: int, rank: int | None = None) -> torch.Tensor:
    root = torch.randn(n, rank or n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T


def test_powers_of_a_singular_matrix_are_finite_and_right_where_it_is_not_singular():
    matrix = random_psd(8, 0, rank=5)
    root, inverse_root = psd_powers(matrix, (0.5, -0.5))
    torch.testing.assert_close(root @ root, matrix, atol=1e-6, rtol=1e-6)
    assert inverse_root.isfinite().all()
    torch.testing.assert_close(root @ inverse_root, torch.eye(8, dtype=torch.float64), atol=1e-6, rtol=1e-6)


def test_reduced_rank_projection_error_is_the_dropped_energy():
    moment, metric = random_psd(10, 1), random_psd(10, 2)
    for rank in (1, 4, 10):
        down, up, energy = reduced_rank_projection(moment, metric, rank)
        residual = torch.eye(10, dtype=torch.float64) - up @ down
        error = (metric @ residual @ moment @ residual.T).trace()
        torch.testing.assert_close(error, energy[rank:].sum(), atol=1e-6, rtol=1e-6)
        covariance = down @ moment @ down.T
        torch.testing.assert_close(covariance, torch.diag(energy[:rank]), atol=1e-6, rtol=1e-6)


def test_reduced_rank_projection_beats_every_perturbation_of_it():
    moment, metric = random_psd(8, 3), damp(random_psd(8, 4), 1e-6)
    down, up, energy = reduced_rank_projection(moment, metric, 3)
    best = energy[3:].sum()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        other_down = down + 0.05 * torch.randn(down.shape, generator=generator, dtype=torch.float64)
        other_up = up + 0.05 * torch.randn(up.shape, generator=generator, dtype=torch.float64)
        residual = torch.eye(8, dtype=torch.float64) - other_up @ other_down
        assert (metric @ residual @ moment @ residual.T).trace() >= best


def test_a_left_root_also_of_what_rounding_left_singular():
    for matrix in (random_psd(8, 0), random_psd(8, 0, rank=5), torch.zeros(8, 8, dtype=torch.float64)):
        root = left_root(matrix)
        torch.testing.assert_close(root @ root.T, matrix, atol=1e-6, rtol=1e-6)
