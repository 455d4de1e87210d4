import pytest
import torch

from surgery.transforms.conjugate_gradients import solve


def run(matrix, gradient, iterations, damping):
    return solve(
        gradient,
        lambda v: matrix @ v,
        iterations,
        damping,
        dot=lambda a, b: float(a @ b),
        plus=lambda a, s, b: a + s * b,
    )


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_as_many_iterations_as_unknowns_solve_exactly(damping):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(12, 8, dtype=torch.float64, generator=generator)
    matrix, gradient = root.T @ root, torch.randn(8, dtype=torch.float64, generator=generator)
    shift = damping * gradient @ matrix @ gradient / (gradient @ gradient)
    expected = torch.linalg.solve(matrix + shift * torch.eye(8, dtype=torch.float64), gradient)
    assert torch.allclose(run(matrix, gradient, 8, damping), expected, rtol=1e-9)
    assert not torch.allclose(run(matrix, gradient, 2, damping), expected, rtol=1e-3)


def test_nothing_to_do_is_nothing_done():
    assert not run(torch.eye(3), torch.zeros(3), 4, 0.1).any()
