"""Rotations folded into the weights, so that what is cached has no channels much larger than the others.

QuaRot (Ashkboos et al., arXiv:2404.00456) and RotateKV (Su et al., arXiv:2501.16383) multiply by Hadamard matrices
before they quantize: a large channel spreads over all, and the step of a group shrinks. What one matrix multiplies from
the left on its way into the cache and another from the right on its way out takes any orthogonal H between the two:

    values    o_h v_g x = (o_h H) (Hᵀ v_g x)        for every query head h that reads KV head g
    latents   up (down x) = (up H) (Hᵀ down x)      for every matrix that reads the latent

Keys that are cached after RoPE do not: the rotation of a position mixes pairs of channels between the two matrices, and
no fixed H passes it. They stay unchanged, quantized by channel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hadamard(size: int) -> Tensor:
    """An orthogonal matrix [size, size], float64, whose entries are all about as large.

    Sylvester's matrix for the power of two in ``size``, times (Kronecker) the discrete cosine transform, type II, for
    the odd rest.

    Raises:
        ValueError: ``size`` is below 1.
    """
    if size < 1:
        raise ValueError(f"an orthogonal matrix of size {size}: at least 1 is needed")
    power = size & -size
    matrix = _cosines(size // power)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    for _ in range(power.bit_length() - 1):
        matrix = torch.kron(step, matrix)
    return matrix


def rotate_values(v: Tensor, o: Tensor, v_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rotates the value heads of an attention layer; what it computes stays the same.

    Args:
        v: value rows of each KV head [G, d, D].
        o: output columns of each query head [D, H, d], heads of a KV head adjacent.
        v_bias: [G, d].

    Returns:
        The three of them rotated, in float64.
    """
    rotation = hadamard(v.shape[1]).to(v.device)
    rotated_bias = None if v_bias is None else v_bias.double() @ rotation
    return rotation.T @ v.double(), o.double() @ rotation, rotated_bias


def rotate_latent(
    down: Tensor, ups: list[Tensor], bias: Tensor | None = None
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Rotates a latent between what writes it and what reads it; the products stay the same.

    Args:
        down: [r, D], the rows that make the latent.
        ups: matrices [..., r] that read it.
        bias: of the latent [r].

    Returns:
        The three of them rotated, in float64; None for no bias.
    """
    rotation = hadamard(len(down)).to(down.device)
    rotated_bias = None if bias is None else bias.double() @ rotation
    return rotation.T @ down.double(), [up.double() @ rotation for up in ups], rotated_bias


def _cosines(size: int) -> Tensor:
    """The orthogonal discrete cosine transform, type II, [size, size]: row k is a cosine of k half-periods."""
    steps = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * steps[:, None] * (steps + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
