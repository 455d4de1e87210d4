"""Making an RMS norm that cannot be left out do nothing.

Stock MLA classes normalise the latent. Two ways to turn that norm into the identity:

- tiny latent: the latent is scaled by 2^-30, so that the norm's eps is all that counts and the norm is linear. Needs
  an eps that all engines agree on: transformers fixes the latent norm's at 1e-6, others read ``rms_norm_eps``.
- constant channel: one more channel holds a large constant from a bias; the norm divides by nothing else. Needs a
  bias on the down projection, takes one number of the cache, and works with any eps and in fp16.

The remaining factor is a known constant; it is folded into the up-projection, and the norm weight is a power of two so
that no dtype rounds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError

TINY_SCALE = 2.0**-30
TINY_EPS = 1e-6
CONSTANT = 2.0**14  # its square, averaged over the channels, dwarfs a latent of unit size; fits fp16


@dataclass(frozen=True)
class NeutralNorm:
    """A norm over ``width`` channels that passes the first ones through as ``gain * channel``.

    Attributes:
        extra: channels added behind the latent (0 or 1).
        scale: what the down projection multiplies the latent by.
        weight: the norm's weight, a power of two.
        gain: what comes out per unit of latent; divide the up-projection by it.
    """

    kind: str
    extra: int
    scale: float
    weight: float
    gain: float

    def down(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The down projection [r, D] and bias [r] as they must be written, [r + extra, D] and [r + extra]."""
        if self.kind == "tiny":
            return weight * self.scale, None if bias is None else bias * self.scale
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return (
            torch.cat([weight, weight.new_zeros(1, weight.shape[1])]),
            torch.cat([bias, bias.new_full((1,), CONSTANT)]),
        )

    def up(self, weight: Tensor) -> Tensor:
        """The up-projection [..., r] as it must be written, [..., r + extra]."""
        weight = weight / self.gain
        return torch.nn.functional.pad(weight, (0, self.extra))


def tiny_norm() -> NeutralNorm:
    """The tiny-latent way; any width, bf16 and fp32."""
    weight = 1 / TINY_SCALE / 1024
    return NeutralNorm("tiny", 0, TINY_SCALE, weight, weight * TINY_SCALE / math.sqrt(TINY_EPS))


def constant_norm(rank: int) -> NeutralNorm:
    """The constant-channel way for a latent of ``rank`` numbers."""
    rms = CONSTANT / math.sqrt(rank + 1)
    weight = 2.0 ** round(math.log2(rms))
    return NeutralNorm("constant", 1, 1.0, weight, weight / rms)


def neutral_norm(kind: str, rank: int, dtype: torch.dtype) -> NeutralNorm:
    """The norm of the given kind ("tiny" or "constant").

    Raises:
        SurgeryError: an unknown kind, or tiny in fp16, where 2^-30 is zero.
    """
    if kind == "tiny":
        if dtype == torch.float16:
            raise SurgeryError("the tiny-latent norm underflows in float16: use --latent-norm constant")
        return tiny_norm()
    if kind == "constant":
        return constant_norm(rank)
    raise SurgeryError(f"unknown latent norm {kind!r}: choose tiny or constant")


def recognised_norm(weight: Tensor, bias: Tensor | None) -> NeutralNorm | None:
    """Which neutral norm a checkpoint has, by the norm's weight [r + extra] and the latent's bias [r + extra], if any.

    None if it is a norm that does something.
    """
    for norm in (tiny_norm(), constant_norm(len(weight) - 1)):
        constant = norm.kind == "tiny" or (bias is not None and float(bias[-1]) == CONSTANT)
        if constant and bool((weight.double() == norm.weight).all()):
            return norm
    return None
