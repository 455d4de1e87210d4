"""Ranks by water-filling: the budget is met exactly and spent where it saves most."""

import itertools

import pytest
import torch

from surgery.transforms.allocation import water_fill


def test_no_other_allocation_drops_less():
    generator = torch.Generator().manual_seed(0)
    spectra = [torch.rand(5, generator=generator).sort(descending=True).values * scale for scale in (1.0, 0.3, 3.0)]

    def dropped(ranks):
        return sum(float(s[r:].sum()) for s, r in zip(spectra, ranks, strict=True))

    for total in range(3, 16):
        ranks = water_fill(spectra, total)
        assert sum(ranks) == total and min(ranks) >= 1
        others = [r for r in itertools.product(range(1, 6), repeat=3) if sum(r) == total]
        assert dropped(ranks) == pytest.approx(min(map(dropped, others)))


@pytest.mark.parametrize("total", [2, 16])
def test_impossible_totals(total):
    with pytest.raises(ValueError, match="cannot be given"):
        water_fill([torch.ones(5)] * 3, total)
