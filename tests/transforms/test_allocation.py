"""Ranks of one budget: met exactly, never exceeded, and spent where it saves most."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from surgery.common.errors import SurgeryError
from surgery.transforms.allocation import Choice, choose_widths, proportional, water_fill

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
SPECTRA = st.lists(st.lists(st.integers(0, 40), min_size=2, max_size=6), min_size=1, max_size=3)


def energies(lists) -> list[torch.Tensor]:
    return [torch.tensor(sorted(values, reverse=True), dtype=torch.float64) for values in lists]


def dropped(spectra, ranks) -> float:
    return sum(float(s[r:].sum()) for s, r in zip(spectra, ranks, strict=True))


@EXAMPLES
@given(SPECTRA, st.integers(0, 18))
def test_no_other_allocation_drops_less(lists, total):
    spectra = energies(lists)
    assume(len(spectra) <= total <= sum(map(len, spectra)))
    ranks = water_fill(spectra, total)
    choices = itertools.product(*(range(1, len(s) + 1) for s in spectra))
    others = [ranks for ranks in choices if sum(ranks) == total]
    assert tuple(ranks) in others
    assert dropped(spectra, ranks) == pytest.approx(min(dropped(spectra, other) for other in others))


@pytest.mark.parametrize("total", [2, 16], ids=["too few", "too many"])
def test_impossible_totals(total):
    with pytest.raises(ValueError, match="cannot be allocated"):
        water_fill([torch.ones(5)] * 3, total)


def test_equal_energies_go_to_the_first():
    assert water_fill([torch.ones(6)] * 3, 10) == [6, 3, 1]


# Widths of two kinds.


def spending(layers, result) -> tuple[int, float]:
    """Numbers in all, and what they cost."""
    selection = [(choices[index], rank) for choices, (index, rank) in zip(layers, result, strict=True)]
    return (
        sum(choice.width + rank for choice, rank in selection),
        sum(choice.cost + float(choice.energies[rank:].sum()) for choice, rank in selection),
    )


CHOICES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 30), st.lists(st.integers(0, 20), min_size=1, max_size=4)),
    min_size=1,
    max_size=3,
)


@EXAMPLES
@given(st.lists(CHOICES, min_size=1, max_size=3), st.integers(1, 24))
def test_no_spending_on_the_hull_costs_less(drawn, total):
    """Prices find every total at which another number's worth changes; what is between them is never worse."""
    layers = [[Choice(width, cost, energies([latent])[0]) for width, cost, latent in choices] for choices in drawn]
    assume(total >= sum(min(choice.width for choice in choices) + 1 for choices in layers))
    options = [
        [(index, rank) for index, choice in enumerate(choices) for rank in range(1, len(choice.energies) + 1)]
        for choices in layers
    ]
    least: dict[int, float] = {}
    for result in itertools.product(*options):
        needed, cost = spending(layers, result)
        least[needed] = min(cost, least.get(needed, cost))
    hull = [
        n
        for n, cost in least.items()
        if all(cost * (b - a) < least[a] * (b - n) + least[b] * (n - a) for a in least if a < n for b in least if b > n)
        and all(least[a] > cost for a in least if a < n)
    ]
    needed, cost = spending(layers, choose_widths(layers, total))
    assert needed <= total
    assert cost <= least[max(n for n in hull if n <= total)] + 1e-9


@EXAMPLES
@given(SPECTRA, st.integers(1, 18))
def test_without_a_choice_widths_are_ranks(lists, total):
    spectra = energies(lists)
    assume(len(spectra) <= total <= sum(map(len, spectra)))
    result = choose_widths([[Choice(0, 0.0, spectrum)] for spectrum in spectra], total)
    assert all(index == 0 for index, _ in result)
    ranks = [rank for _, rank in result]
    assert sum(ranks) == total
    assert dropped(spectra, ranks) == pytest.approx(dropped(spectra, water_fill(spectra, total)))


def test_a_layer_that_hangs_on_rotations_gets_them():
    latent = torch.tensor([8.0, 4.0, 2.0, 1.0])
    turning = [Choice(0, 100.0, latent), Choice(4, 0.0, latent)]
    still = [Choice(0, 1.0, latent), Choice(4, 0.0, latent)]
    assert choose_widths([turning, still], 9) == [(1, 3), (0, 2)]
    with pytest.raises(ValueError, match="1 elements are too few for 2 layers"):
        choose_widths([turning, still], 1)


# Proportional.


def test_shares_of_a_budget():
    assert proportional([1, 2, 5], 16) == [2, 4, 10]
    assert proportional([1, 2, 5], 16, multiple=4) == [4, 4, 8]
    assert proportional([1, 2, 5], 17, multiple=4) == [4, 4, 8]
    assert proportional([1, 1, 100], 30, maximum=20) == [5, 5, 20]
    assert proportional([0, 1, 3], 20, minimum=2) == [2, 5, 13]
    assert proportional([0, 0], 6) == [3, 3]
    assert proportional([1, 1], 100, maximum=[4, 7], multiple=2) == [4, 6]


@EXAMPLES
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=6),
    st.integers(1, 200),
    st.integers(1, 8),
    st.integers(0, 20),
    st.integers(20, 60),
)
def test_shares_within_their_bounds(weights, total, multiple, minimum, maximum):
    least, limit = -(-minimum // multiple), maximum // multiple
    assume(least * multiple * len(weights) <= total and least <= limit)
    ranks = proportional(weights, total, multiple, minimum, maximum)
    assert all(rank % multiple == 0 and minimum <= rank <= maximum for rank in ranks)
    assert sum(ranks) == multiple * min(total // multiple, limit * len(weights))
    for (a, wa), (b, wb) in itertools.permutations(zip(ranks, weights, strict=True), 2):
        assert a <= b + multiple or wa > wb  # who has more weighs more


def test_shares_that_cannot_be():
    with pytest.raises(SurgeryError, match="a rank of 5 cannot be split into 3 blocks of at least 2"):
        proportional([1, 1, 1], 5, minimum=2)
    with pytest.raises(SurgeryError, match="cannot be split"):
        proportional([1, 1], 64, multiple=16, minimum=1, maximum=8)
