"""Neutral norm: an RMS norm that a stock class requires, made the identity.

Stock MLA classes normalize the latent. Two methods turn that norm into the identity:

- tiny latent: the latent is so small that eps dominates the mean square, and the norm is nearly linear. Needs an eps
  that all engines share: transformers fixes the latent norm's at 1e-6, other engines read ``rms_norm_eps``.
- constant channel: an added channel holds a large constant from a bias, which dominates the mean square. Needs a bias
  on the down projection, takes one cached element, and works with any eps.

The remaining factor is a known constant, folded into the up-projection. The norm's weight is a power of two, which no
dtype rounds.

Error of the tiny latent: for a latent z scaled by s, the norm returns ``gain * z / (1 + v)^½`` with
v = s² mean(z²) / eps, which is too small by a relative error between 0 and v/2. For latents of mean square one, v/2 is
2^-13 in half-precision formats (s = 2^-16), below their rounding errors of 2^-9 and 2^-12, and 2^-19 in float32
(s = 2^-19). A smaller s would reduce the error but leave the range of float16, fp8 and the scales of quantized weights.
Checkpoints of earlier versions have s = 2^-30, which float16 and most weight quantizers round to 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError

HALF_SCALE, WIDE_SCALE, OLD_SCALE = 2.0**-16, 2.0**-19, 2.0**-30
"""Factors of a tiny latent: in bfloat16 and float16, in wider dtypes, and in checkpoints of earlier versions."""
TINY_EPS = 1e-6
CONSTANT = 2.0**14  # its square dominates the mean over a latent of unit size; fits float16


@dataclass(frozen=True)
class NeutralNorm:
    """RMS norm, "tiny" or "constant", that passes the latent's channels through as ``gain * channel``.

    ``extra`` channels are added after the latent, which is scaled in the down projection; the up-projection is divided
    by the gain. The norm's weight is a power of two.
    """

    kind: str
    extra: int
    scale: float
    weight: float
    gain: float

    def down(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return down projection [r + extra, D] and bias [r + extra] to write, from the latent's [r, D] and [r]."""
        if self.kind == "tiny":
            return weight * self.scale, None if bias is None else bias * self.scale
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        return (
            torch.cat([weight, weight.new_zeros(1, weight.shape[1])]),
            torch.cat([bias, bias.new_full((1,), CONSTANT)]),
        )

    def up(self, weight: Tensor) -> Tensor:
        """Return the up-projection [..., r + extra] to write, from that of the latent [..., r]."""
        weight = weight / self.gain
        return torch.nn.functional.pad(weight, (0, self.extra))

    def weights(self, rank: int) -> Tensor:
        """Return the norm's weight [rank + extra]; 0 for the constant, which is not read and would overflow fp8."""
        return torch.cat([torch.full((rank,), self.weight), torch.zeros(self.extra)])


def tiny_norm(scale: float) -> NeutralNorm:
    """Return the neutral norm of a tiny latent with this scale; any rank."""
    weight = 1 / scale / 1024
    return NeutralNorm("tiny", 0, scale, weight, weight * scale / math.sqrt(TINY_EPS))


def constant_norm(rank: int) -> NeutralNorm:
    """Return the neutral norm with a constant channel for a latent of ``rank`` channels."""
    rms = CONSTANT / math.sqrt(rank + 1)
    weight = 2.0 ** round(math.log2(rms))
    return NeutralNorm("constant", 1, 1.0, weight, weight / rms)


def neutral_norm(kind: str, rank: int, dtype: torch.dtype) -> NeutralNorm:
    """Return the neutral norm of a kind, "tiny" or "constant", for weights of a dtype.

    Raises SurgeryError: an unknown kind.
    """
    if kind == "tiny":
        return tiny_norm(HALF_SCALE if dtype.itemsize <= 2 else WIDE_SCALE)
    if kind == "constant":
        return constant_norm(rank)
    raise SurgeryError(f"unknown latent norm {kind!r}; choose tiny or constant")


def recognized_norm(weight: Tensor, bias: Tensor | None) -> NeutralNorm | None:
    """Recognize a checkpoint's neutral norm by its weight [r + extra] and the latent's bias [r + extra], if any.

    None for a real norm. Earlier versions wrote the same weight for the constant channel too.
    """
    for norm in (constant_norm(len(weight) - 1), *map(tiny_norm, (HALF_SCALE, WIDE_SCALE, OLD_SCALE))):
        constant = norm.kind == "tiny" or (
            bias is not None and float(bias[-1]) == CONSTANT and float(weight[-1]) in (0.0, norm.weight)
        )
        if constant and bool((weight[: len(weight) - norm.extra].double() == norm.weight).all()):
            return norm
    return None
