"""Conjugate gradients on damped normal equations, for unknowns of any form that can be added and multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Vector = TypeVar("Vector")


def solve(
    gradient: Vector,
    normal: Callable[[Vector], Vector],
    iterations: int,
    damping: float,
    *,
    dot: Callable[[Vector, Vector], float],
    plus: Callable[[Vector, float, Vector], Vector],
) -> Vector:
    """Approximate solution v of ``(N + λ) v = gradient`` (Hestenes and Stiefel 1952), starting from zero.

    Args:
        normal: v ↦ N v, symmetric and positive semidefinite.
        iterations: each multiplies by N once.
        damping: λ relative to the curvature of N along the gradient.
        dot: inner product. plus: (a, s, b) ↦ a + s b.
    """
    squared = dot(gradient, gradient)
    solution = plus(gradient, -1.0, gradient)
    if squared == 0:
        return solution
    curved = normal(gradient)
    damping = damping * dot(gradient, curved) / squared
    direction, residual = gradient, gradient
    for iteration in range(iterations):
        product = plus(normal(direction) if iteration else curved, damping, direction)
        step = squared / dot(direction, product)
        solution, residual = plus(solution, step, direction), plus(residual, -step, product)
        new_squared = dot(residual, residual)
        direction = plus(residual, new_squared / squared, direction)
        squared = new_squared
    return solution
