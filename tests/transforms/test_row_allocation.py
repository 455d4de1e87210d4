"""One budget of bytes over the rows of all layers."""

import math

import pytest
import torch

from surgery.model.token_format import PATTERNS, TokenFormat
from surgery.transforms.row_allocation import WIDTHS, Section, allocate_rows, granule_of, noise, row_cost, unit_order


def sections() -> list[Section]:
    decays = ((40, 1), (12, 2), (25, 1), (30, 2))
    return [Section(torch.exp(-torch.arange(160 // unit) / decay).double(), unit) for decay, unit in decays]


def cost(section: Section, runs) -> float:
    """Σ λ D of a section, unit by unit."""
    widths = [bits for name, count in runs for bits in PATTERNS[name] for _ in range(count // section.unit)]
    leftovers = torch.ones(len(section.energies), dtype=torch.float64)
    for position, rank in enumerate(unit_order(runs, section.unit)):
        if rank < len(leftovers):
            leftovers[rank] = noise(widths[position])
    return float((section.energies * leftovers).sum())


@pytest.mark.parametrize("budget", [64, 128, 200, 320])
@pytest.mark.parametrize("granule", [4, 16])
def test_the_budget_is_kept_and_spent(budget, granule):
    result = allocate_rows(sections(), budget, granule=granule)
    spent = sum(TokenFormat(runs).row_bytes for runs in result)
    assert budget - granule < spent <= budget
    assert all(count % granule == 0 for runs in result for _, count in runs)
    assert list(map(row_cost, sections(), result)) == pytest.approx(list(map(cost, sections(), result)), rel=1e-9)


@pytest.mark.parametrize("budget", [64, 160])
def test_it_is_near_the_best_without_rows(budget):
    """Reverse water-filling of every channel by itself, in the same widths."""
    result = sum(map(row_cost, sections(), allocate_rows(sections(), budget, granule=4)))
    errors = torch.tensor([1.0, *map(noise, WIDTHS)], dtype=torch.float64)
    prices = torch.tensor([0, *WIDTHS], dtype=torch.float64)
    low, high = -60.0, 20.0
    for _ in range(60):
        rate = math.exp((low + high) / 2)
        picks = [(s.energies[:, None] * errors + rate * s.unit * prices).argmin(1) for s in sections()]
        spent = sum(s.unit * float(prices[pick].sum()) for s, pick in zip(sections(), picks, strict=True)) / 8
        low, high = ((low + high) / 2, high) if spent > budget else (low, (low + high) / 2)
    best = sum(float((s.energies * errors[pick]).sum()) for s, pick in zip(sections(), picks, strict=True))
    assert best * 0.95 <= result <= 1.08 * best


def test_wide_fields_hold_the_units_of_most_energy():
    runs = (("5+3", 4), ("4+4", 2))
    assert unit_order(runs) == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7]
    assert unit_order(runs, 2) == [0, 1, 4, 5, 2, 3]


def test_every_section_has_its_least():
    empty = [Section(torch.zeros(8), least=1), Section(torch.ones(64))]
    assert TokenFormat(allocate_rows(empty, 24, granule=4)[0]).row_bytes == 4
    with pytest.raises(ValueError, match="below the minimum"):
        allocate_rows(empty, 3, granule=4)


def test_noise_is_that_of_lloyd_and_max():
    # Max, "Quantizing for minimum distortion" (1960), table II: uniform quantizers of 2, 4, 8, 16 and 32 levels.
    for bits, error in ((1, 0.3634), (2, 0.1188), (3, 0.03744), (4, 0.01154), (5, 0.003495)):
        assert noise(bits) == pytest.approx(error, rel=2e-3)
    assert granule_of(384) == 4 and granule_of(2048) == 16
