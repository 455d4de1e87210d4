"""Rotary position embeddings: the frequencies that a config asks for, and the rotation in complex form."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError

# The scalings whose frequencies do not depend on the length of the text. "dynamic" and "longrope" change theirs while
# decoding, which no conversion that mixes frequencies into weights can follow.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_frequencies(config, head_dim: int) -> tuple[Tensor, float]:
    """The inverse frequencies of a transformers config and the factor on its cosines and sines.

    Returns float64 radians per token of shape [head_dim / 2] (the float32 values that transformers computes, so that
    a conversion rotates as the source does) and the attention factor (1.0 but for YaRN).

    Raises:
        SurgeryError: a RoPE type, or a partial rotation, that the toolkit cannot carry.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        raise SurgeryError(
            f"config.json: no single set of RoPE parameters in {parameters!r}; this model is not supported"
        )
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC_ROPE_TYPES:
        raise SurgeryError(
            f"config.json: RoPE type {kind!r} is not supported (supported: {', '.join(STATIC_ROPE_TYPES)})"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise SurgeryError("config.json: partial_rotary_factor is not supported, every pair of a head must be rotated")
    if kind == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return (1.0 / parameters["rope_theta"] ** exponent).double(), 1.0
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    if len(inv_freq) != head_dim // 2:
        raise SurgeryError(f"config.json: RoPE gives {len(inv_freq)} frequencies for a head dimension of {head_dim}")
    return inv_freq.double(), float(factor)


def to_complex(x: Tensor) -> Tensor:
    """Half-split real pairs [..., d] as complex numbers [..., d/2]."""
    real, imag = x.chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imag.contiguous())


def to_real(z: Tensor) -> Tensor:
    """The inverse of :func:`to_complex`."""
    return torch.cat([z.real, z.imag], dim=-1)


def phases(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """``exp(1j * inv_freq * position)``, complex [len(positions), len(inv_freq)]; angles are taken in float64."""
    angle = positions.double()[:, None] * inv_freq.to(positions.device)
    return torch.polar(torch.ones_like(angle), angle).to(dtype.to_complex())


def rotate(x: Tensor, phase: Tensor) -> Tensor:
    """Rotates half-split ``x`` [..., T, heads, d] by ``phase`` [T, d/2]."""
    return to_real(to_complex(x) * phase[:, None])


def default_theta(inv_freq: Tensor) -> float | None:
    """The base θ for which default RoPE gives exactly these frequencies in this order, or None.

    Default RoPE is the geometric grid ``θ**(-i/n)``, i = 0 … n-1, starting at 1.
    """
    n = len(inv_freq)
    if n == 0 or abs(float(inv_freq[0]) - 1) > 1e-6:
        return None
    theta = 10000.0 if n == 1 else float(inv_freq[1]) ** -n
    grid = theta ** -(torch.arange(n, dtype=torch.float64) / n)
    return theta if torch.allclose(grid, inv_freq.double(), rtol=1e-5, atol=0) else None
