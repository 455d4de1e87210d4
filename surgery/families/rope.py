"""Rotary position embeddings: frequencies of a config, and the rotation in complex form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError

# RoPE types whose frequencies do not depend on the text's length. "dynamic" and "longrope" change theirs while
# decoding; a conversion that folds frequencies into weights cannot follow. For longrope the model class computes them.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LONGROPE = "longrope"


def unchanged_length(config) -> int | None:
    """Return the longest text, in tokens, for which RoPE frequencies are constant; None if they never change."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != LONGROPE or rope.get("short_factor") == rope.get("long_factor"):
        return None
    return rope["original_max_position_embeddings"]


def rope_frequencies(
    config, head_dim: int, layer_type: str | None = None, kinds: Sequence[str] = STATIC_ROPE_TYPES
) -> tuple[Tensor, float]:
    """Compute the inverse frequencies of a transformers config and its attention factor.

    Returns float64 radians per token [n], n ≤ head_dim / 2 rotated pairs, with the float32 values of transformers, and
    the factor on cosines and sines (1.0 but for YaRN and longrope). ``layer_type`` is for RoPE parameters per type
    (Gemma 3); "longrope" gives the frequencies of short texts. Raises SurgeryError: an unsupported RoPE type, or
    impossible parameters.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config, "rope_parameters", None)
    of_type = {}
    if isinstance(parameters, dict) and layer_type in parameters:
        parameters, of_type = parameters[layer_type], {"layer_type": layer_type}
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        raise SurgeryError(f"config.json: rope_parameters must be one set with rope_theta, not {parameters!r}")
    kind = parameters.get("rope_type", "default")
    theta, part = parameters["rope_theta"], parameters.get("partial_rotary_factor", 1.0)
    if not _is_number(theta) or not _is_number(part) or theta <= 0 or not 0 < part <= 1:
        raise SurgeryError(f"config.json: rope_theta {theta!r} or partial_rotary_factor {part!r} is out of range")
    if kind == "dynamic":  # equals default RoPE up to max_position_embeddings
        raise SurgeryError(
            "config.json: RoPE type 'dynamic' changes its frequencies beyond max_position_embeddings, which no target "
            "but hybrid, for models without MLA, supports; for shorter contexts remove rope_scaling from config.json, "
            "or set rope_type to 'default' in its rope_parameters",
            hint="--to hybrid",
        )
    if kind not in kinds:
        raise SurgeryError(f"config.json: RoPE type {kind!r} is not supported (supported: {', '.join(kinds)})")
    rotated = int(head_dim * part)
    try:
        if kind == "default":
            inv_freq, factor = 1.0 / theta ** (torch.arange(0, rotated, 2, dtype=torch.float) / rotated), 1.0
        else:
            inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"), **of_type)
        usable = bool(inv_freq.isfinite().all()) and math.isfinite(factor)
    except (TypeError, LookupError, ValueError, ArithmeticError, RuntimeError):
        usable = False
    if not usable:
        raise SurgeryError(f"config.json: invalid parameters of RoPE type {kind!r}: {parameters}")
    if 2 * len(inv_freq) != rotated:
        raise SurgeryError(f"config.json: {len(inv_freq)} RoPE frequencies do not fit {rotated} rotary dimensions")
    return inv_freq.double(), float(factor)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def half_split_order(head_dim: int, rotated: int, *, interleaved: bool) -> Tensor | None:
    """Return the row order that makes a head half-split over all its dims; None if it is in this order already.

    The first ``rotated`` dims are rotated in pairs (i, i + rotated / 2), or (2 i, 2 i + 1) if ``interleaved``. The rest
    become unrotated pairs.
    """
    first = torch.arange(rotated).view(-1, 2).T if interleaved else torch.arange(rotated).view(2, -1)
    still = torch.arange(rotated, head_dim).view(2, -1)
    order = torch.cat([first, still], dim=1).flatten()
    return None if torch.equal(order, torch.arange(head_dim)) else order


def to_complex(x: Tensor) -> Tensor:
    """Convert half-split real pairs [..., d] to complex [..., d/2]; 16-bit inputs to complex64, PyTorch's smallest."""
    real, imag = (x.float() if x.itemsize < 4 else x).chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imag.contiguous())


def to_real(z: Tensor) -> Tensor:
    """Convert complex pairs [..., d/2] back to half-split real ones [..., d]."""
    return torch.cat([z.real, z.imag], dim=-1)


def phases(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``exp(1j * inv_freq * position)`` [len(positions), len(inv_freq)] with float64 angles."""
    angle = positions.double()[:, None] * inv_freq.to(positions.device)
    return torch.polar(torch.ones_like(angle), angle).to(complex_dtype(dtype))


def complex_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the complex dtype of a real dtype, at least complex64: PyTorch does little in complex32."""
    return torch.promote_types(dtype, torch.float32).to_complex()


def rotate(x: Tensor, phase: Tensor) -> Tensor:
    """Rotate half-split ``x`` [..., T, heads, d] by ``phase`` [T, d/2]."""
    return to_real(to_complex(x) * phase[:, None]).to(x)


def default_theta(inv_freq: Tensor) -> float | None:
    """Return the base θ for which default RoPE has these frequencies in this order, or None.

    Default RoPE is the geometric grid ``θ**(-i/n)``, i = 0 … n-1, starting at 1.
    """
    n = len(inv_freq)
    if n == 0 or abs(float(inv_freq[0]) - 1) > 1e-6 or float(inv_freq.min()) <= 0:
        return None
    theta = 10000.0 if n == 1 else float(inv_freq[1]) ** -n
    grid = theta ** -(torch.arange(n, dtype=torch.float64) / n)
    return theta if torch.allclose(grid, inv_freq.double(), rtol=1e-5, atol=0) else None
