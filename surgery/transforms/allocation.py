"""Allocation of one rank budget over layers, heads, keys and values.

All functions take the total number of elements per token and never exceed it. ``water_fill`` and ``proportional`` keep
ranks at a hardware-friendly multiple and spend the budget up to the last multiple.

=============== ==================================== ==========================================
allocation      ranks follow                         compares layers by
=============== ==================================== ==========================================
water_fill      the energies that are dropped        those energies: in a Fisher metric only,
                                                     where each is a share of one loss
proportional    any weights, such as Palu's Fisher   the weights
                information
choose_widths   the dropped energies, and the cost   those energies and costs
                of elements next to a latent
=============== ==================================== ==========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError


def water_fill(spectra: list[Tensor], total: int) -> list[int]:
    """Allocate ranks of at least 1 that drop the least total energy and sum to ``total``.

    Energies, descending by layer or block, must be comparable, as in a Fisher metric. The saving of each further rank
    descends too, so taking the largest savings first is optimal.

    Raises ValueError: ``total`` is less than the number of spectra, or more than the number of energies.
    """
    sizes = [len(spectrum) for spectrum in spectra]
    if not len(spectra) <= total <= sum(sizes) or not min(sizes):
        raise ValueError(f"{total} ranks cannot be allocated to {len(spectra)} layers of {sizes} dimensions")
    owner = torch.cat([torch.full((len(spectrum) - 1,), i) for i, spectrum in enumerate(spectra)])
    saved = torch.cat([spectrum[1:] for spectrum in spectra])
    owners = owner[saved.argsort(descending=True, stable=True)[: total - len(spectra)]]
    return [1 + int((owners == i).sum()) for i in range(len(spectra))]


@dataclass(frozen=True)
class Choice:
    """One way to spend a layer's elements: ``width`` fixed ones at a cost, and a latent of descending energies."""

    width: int
    cost: float
    energies: Tensor


def choose_widths(layers: Sequence[Sequence[Choice]], total: int) -> list[tuple[int, int]]:
    """Pick a choice and a rank for every layer, with the least total cost within ``total`` elements per token.

    At a given price per element, layers are optimized independently. Bisection finds the lowest price at which all
    layers fit (Everett 1963, doi:10.1287/opre.11.3.399: no other allocation of the same total costs less). Remaining
    elements go to the latents that drop the most energy. Returns for every layer, the index of the choice and the rank,
    at least 1. Raises ValueError: ``total`` is less than the smallest choices take with a rank of 1.
    """
    if total < sum(min(choice.width for choice in choices) + 1 for choices in layers):
        raise ValueError(f"{total} elements are too few for {len(layers)} layers")
    num_choices, longest = max(map(len, layers)), max(len(choice.energies) for choices in layers for choice in choices)
    dropped = torch.full((len(layers), num_choices, longest), torch.inf, dtype=torch.float64)  # by rank
    fixed, widths = (
        torch.zeros(len(layers), num_choices, dtype=torch.float64),
        torch.zeros(len(layers), num_choices).long(),
    )
    for layer, choices in enumerate(layers):
        for index, choice in enumerate(choices):
            dropped[layer, index, : len(choice.energies)] = _dropped(choice.energies)
            fixed[layer, index], widths[layer, index] = choice.cost, choice.width
    ranks = torch.arange(1, longest + 1)

    def best(price: float) -> tuple[Tensor, Tensor]:
        costs, rank = (dropped + price * ranks).min(-1)
        index = (fixed + price * widths + costs).argmin(-1, keepdim=True)
        return index, rank.gather(-1, index) + 1

    def needed(choice: tuple[Tensor, Tensor]) -> int:
        index, rank = choice
        return int((widths.gather(-1, index) + rank).sum())

    low, high = 0.0, max(choice.cost + float(choice.energies.sum()) for choices in layers for choice in choices) + 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if needed(best(middle)) <= total else (middle, high)
    remaining = total - needed(best(high))
    per_layer = list(zip(*(each.flatten().tolist() for each in best(high)), strict=True))
    spectra = [choices[index].energies[rank:] for choices, (index, rank) in zip(layers, per_layer, strict=True)]
    owner = torch.cat([torch.full((len(part),), layer) for layer, part in enumerate(spectra)])
    owners = owner[torch.cat(spectra).argsort(descending=True, stable=True)[:remaining]]
    return [(index, rank + int((owners == layer).sum())) for layer, (index, rank) in enumerate(per_layer)]


def _dropped(energies: Tensor) -> Tensor:
    """Return the energy that each rank 1, 2, … drops."""
    return torch.cat([energies.flip(0).cumsum(0).flip(0)[1:], energies.new_zeros(1)])


def proportional(
    weights: Sequence[float],
    total: int,
    multiple: int = 1,
    minimum: int = 1,
    maximum: int | Sequence[int] | None = None,
) -> list[int]:
    """Allocate ranks in proportion to weights, within bounds; rounding goes to the largest remainders.

    Bounds are rounded to the multiple, and ``maximum`` may be one per rank. A remainder below one multiple, or above
    the maxima, stays unspent. Raises SurgeryError: ``total`` is less than the minima, or a maximum less than the
    minimum.
    """
    least = -(-minimum // multiple)
    bounds = [maximum] * len(weights) if maximum is None or isinstance(maximum, int) else maximum
    limits = [total // multiple if bound is None else bound // multiple for bound in bounds]
    budget = min(total // multiple, sum(limits))
    if budget < least * len(weights) or min(limits) < least:
        raise SurgeryError(
            f"a rank of {total} cannot be split into {len(weights)} blocks of at least {least * multiple}"
        )

    def shares(level: float) -> list[float]:
        return [min(max(level * weight, least), top) for weight, top in zip(weights, limits, strict=True)]

    # Bisect the level at which the clamped shares fill the budget: their sum grows with it.
    low, high = 0.0, max(limits) / min((weight for weight in weights if weight > 0), default=1.0)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) <= budget else (low, middle)
    exact = shares(low)
    ranks = [int(share + 1e-9) for share in exact]
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i] - exact[i], i))
    while sum(ranks) < budget:
        for i in order:
            if sum(ranks) < budget and ranks[i] < limits[i]:
                ranks[i] += 1
    return [rank * multiple for rank in ranks]
