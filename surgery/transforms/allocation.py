"""Spends one budget of ranks over layers by predicted error."""

from __future__ import annotations

import torch
from torch import Tensor


def water_fill(spectra: list[Tensor], total: int, minimum: int = 1) -> list[int]:
    """Ranks that sum to ``total`` and drop the least energy in all.

    Energies must be comparable between the spectra, as those in a Fisher metric are: each is a share of one loss.

    Args:
        spectra: per layer, energies in descending order.
        total: ranks to give out.
        minimum: every layer's at least.

    Raises:
        ValueError: the total is less than the minimum of all, or more than there are energies.
    """
    sizes = [len(spectrum) for spectrum in spectra]
    if not minimum * len(spectra) <= total <= sum(sizes):
        raise ValueError(f"{total} ranks cannot be given to {len(spectra)} layers of {sizes} dimensions")
    rest = torch.cat([spectrum[minimum:] for spectrum in spectra])
    layer = torch.cat([torch.full((len(spectrum) - minimum,), i) for i, spectrum in enumerate(spectra)])
    chosen = layer[rest.argsort(descending=True, stable=True)[: total - minimum * len(spectra)]]
    return [minimum + int((chosen == i).sum()) for i in range(len(spectra))]
