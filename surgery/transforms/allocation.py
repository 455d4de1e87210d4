"""Spends one budget of ranks over layers, heads, keys and values.

All are told how many numbers per token there are in all, keep every rank a multiple of what hardware likes, spend the
budget to the last multiple, and never exceed it.

=============== ==================================== ==========================================
allocation      ranks follow                         compares layers by
=============== ==================================== ==========================================
water_fill      the energies that are dropped        those energies: in a Fisher metric only,
                                                     where each is a share of one loss
proportional    any weights, as Palu's Fisher        the weights
                information
choose_widths   the same, and what is spent on       the same
                numbers next to a latent
=============== ==================================== ==========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError


def water_fill(spectra: list[Tensor], total: int, minimum: int = 1, multiple: int = 1) -> list[int]:
    """Ranks that drop the least energy in all, of those that are multiples and sum to no more than ``total``.

    Energies must be comparable between the spectra, as those in a Fisher metric are: each is a share of one loss. As
    they descend, what each further multiple saves descends too, and taking the largest savings first is optimal.

    Args:
        spectra: per layer or block, energies in descending order.
        total: ranks to give out; all are, but for what is less than one multiple.
        minimum: every spectrum's at least, rounded up to the multiple.
        multiple: of which every rank is one.

    Raises:
        ValueError: the total is less than the minimum of all, or more than there are energies.
    """
    sizes = [len(spectrum) for spectrum in spectra]
    least = -(-minimum // multiple)  # from here on in multiples
    limits = [size // multiple for size in sizes]
    if not least * multiple * len(spectra) <= total <= sum(sizes) or min(limits) < least:
        kind = "ranks" if multiple == 1 else f"ranks in multiples of {multiple}"
        raise ValueError(f"{total} {kind} cannot be given to {len(spectra)} layers of {sizes} dimensions")
    saved = [s[: n * multiple].view(n, multiple).sum(-1)[least:] for s, n in zip(spectra, limits, strict=True)]
    owner = torch.cat([torch.full((len(part),), i) for i, part in enumerate(saved)])
    owners = owner[torch.cat(saved).argsort(descending=True, stable=True)[: total // multiple - least * len(spectra)]]
    return [(least + int((owners == i).sum())) * multiple for i in range(len(spectra))]


@dataclass(frozen=True)
class Choice:
    """One way to spend a layer's numbers: some of them fixed, the others a rank.

    Attributes:
        width: the fixed ones.
        cost: of this choice, in the unit of the energies.
        energies: of the latent next to them, in descending order.
    """

    width: int
    cost: float
    energies: Tensor


def choose_widths(layers: Sequence[Sequence[Choice]], total: int) -> list[tuple[int, int]]:
    """A choice and a rank for every layer, of least cost in all, of those that need no more than ``total`` numbers.

    For a price of a number every layer's best is found by itself; the lowest price at which all fit is sought by
    bisection (Everett 1963, doi:10.1287/opre.11.3.399: no other spending of the same total costs less). Numbers that
    are left go to the latents that drop most.

    Returns:
        Index of the choice and rank, at least 1, of every layer.

    Raises:
        ValueError: the total is less than what the smallest choices take with a rank of 1.
    """
    if total < sum(min(choice.width for choice in choices) + 1 for choices in layers):
        raise ValueError(f"{total} numbers are too few for {len(layers)} layers")
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
    """Return the energies that ranks of 1, 2, … leave out."""
    return torch.cat([energies.flip(0).cumsum(0).flip(0)[1:], energies.new_zeros(1)])


def proportional(
    weights: Sequence[float],
    total: int,
    multiple: int = 1,
    minimum: int = 1,
    maximum: int | Sequence[int] | None = None,
) -> list[int]:
    """Ranks in proportion to weights, within bounds; what rounding leaves goes to the largest remainders.

    Args:
        weights: not negative.
        total: ranks to give out; all are, but for what is less than one multiple or what the maxima cannot hold.
        multiple: of which every rank is one.
        minimum: of every rank, rounded up to the multiple.
        maximum: of every rank, or of each, rounded down to the multiple.

    Raises:
        SurgeryError: the total is less than the minima together.
    """
    least = -(-minimum // multiple)
    bounds = [maximum] * len(weights) if maximum is None or isinstance(maximum, int) else maximum
    limits = [total // multiple if bound is None else bound // multiple for bound in bounds]
    budget = min(total // multiple, sum(limits))
    if budget < least * len(weights) or min(limits) < least:
        raise SurgeryError(f"{total} ranks cannot be shared by {len(weights)} blocks of at least {least * multiple}")

    def shares(level: float) -> list[float]:
        return [min(max(level * weight, least), top) for weight, top in zip(weights, limits, strict=True)]

    # The level at which clamped shares fill the budget; what they hold grows with it.
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
