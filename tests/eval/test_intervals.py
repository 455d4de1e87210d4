import numpy as np
import pytest

from surgery.common.errors import SurgeryError
from surgery.eval.intervals import paired_difference, student_t


@pytest.mark.parametrize(
    ("freedom", "level", "tabulated"),
    [(1, 0.95, 12.7062), (2, 0.95, 4.3027), (15, 0.95, 2.1314), (100, 0.95, 1.9840), (3, 0.8, 1.6377)],
)
def test_students_t_is_the_tables(freedom, level, tabulated):
    assert student_t(freedom, level) == pytest.approx(tabulated, abs=1e-4)


@pytest.mark.parametrize("samples", [4, 16])
def test_intervals_cover_what_they_claim(samples):
    """95% of the intervals of 2,000 draws of normal differences contain the mean (standard error 0.5%)."""
    draws = np.random.default_rng(0).normal(0.1, 0.5, (2000, samples))
    intervals = [paired_difference(draw, np.zeros(samples)) for draw in draws]
    assert np.mean([each.low <= 0.1 <= each.high for each in intervals]) == pytest.approx(0.95, abs=0.015)


def test_shares_have_an_interval_where_all_samples_agree():
    """Agresti and Min with no discordant pair among 16: 1.96 * sqrt(1 / 18) / sqrt(18)."""
    same = paired_difference([True] * 16, [True] * 16)
    assert same.difference == 0 and same.high == -same.low == pytest.approx(1.96 / 18, abs=1e-4)
    lost = paired_difference([0, 0, 1, 1], [1, 1, 1, 1])
    assert lost.difference == -0.5 and lost.low == pytest.approx(
        -1 / 3 - 1.96 * (3 / 6 - 1 / 9) ** 0.5 / 6**0.5, abs=1e-4
    )


def test_pairing_takes_the_samples_own_spread_away_and_one_has_no_interval():
    baseline = np.linspace(0, 100, 50)
    difference = paired_difference(baseline + 0.25, baseline)
    assert difference.difference == pytest.approx(0.25) and difference.high - difference.low < 1e-9
    difference = paired_difference([2.5], [2.0])
    assert (difference.difference, difference.low, difference.high, difference.samples) == (0.5, None, None, 1)


@pytest.mark.parametrize("pair", [([1.0], [1.0, 2.0]), ([], [])])
def test_unpaired_samples_are_refused(pair):
    with pytest.raises(SurgeryError, match="paired"):
        paired_difference(*pair)
