"""Spends one budget of bytes over latents: how many every layer keeps, and in how many bits each of them.

To second order a latent of energy λ (its share of the loss) costs λ if it is dropped, and ``λ D(b)`` in b bits
with D the noise of a code relative to the variance. The choice that costs least under a budget of bits is that of
reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3) with the bits that there are: every
latent by itself takes what minimises ``λ D(b) + μ b``, with one price μ for all. A layer's energies descend, so its
first latents have the most bits and its last none.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from surgery.model.quantization import dequantize, quantize

FORMATS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
"""Formats that are chosen from, and their bits."""
SAMPLES = 4096
"""Groups that tell the noise of a code to a hundredth of it."""


@cache
def noise(bits: int, group: int) -> float:
    """Mean squared error of quantising ``group`` normal numbers of variance one, clipped, in a sample."""
    values = torch.randn(SAMPLES, group, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return float((dequantize(*quantize(values, f"int{bits}", -1, clip=True)) - values).square().mean())


def allocate_bits(
    spectra: list[Tensor], budget: float, group: int, scale_bits: int
) -> list[tuple[tuple[str, int], ...]]:
    """The formats of every layer's latents.

    Args:
        spectra: per layer the energies of all possible latents, descending; comparable between layers.
        budget: bits per token in all layers together.
        group: tokens that share a scale and a zero in a channel.
        scale_bits: of a scale, and of a zero.

    Returns:
        For each layer formats and numbers of adjacent latents, from the first on; a layer keeps one latent at least.

    Raises:
        ValueError: the budget is less than one latent in the fewest bits for every layer.
    """
    formats = list(FORMATS)
    overhead = 2 * scale_bits / group
    price = torch.tensor([FORMATS[name] + overhead for name in formats] + [0.0], dtype=torch.float64)
    cost = torch.tensor([noise(FORMATS[name], group) for name in formats] + [1.0], dtype=torch.float64)
    if budget < len(spectra) * float(price[:-1].min()):
        raise ValueError(f"{budget:.0f} bits per token cannot be spread over {len(spectra)} layers")
    energies = [spectrum.double().clamp_min(0) for spectrum in spectra]

    def choose(rate: float) -> list[Tensor]:
        chosen = [(energy[:, None] * cost + rate * price).argmin(-1) for energy in energies]
        for choice in chosen:
            choice[0] = min(int(choice[0]), len(formats) - 1)
        return chosen

    least, most = -60.0, 60.0  # exponents of e
    scale = max(float(energy.max()) for energy in energies) or 1.0
    for _ in range(100):
        middle = (least + most) / 2
        spent = sum(float(price[choice].sum()) for choice in choose(scale * torch.tensor(middle).exp().item()))
        least, most = (middle, most) if spent > budget else (least, middle)
    chosen = choose(scale * torch.tensor(most).exp().item())
    return [
        tuple((name, count) for number, name in enumerate(formats) if (count := int((choice == number).sum())))
        for choice in chosen
    ]
