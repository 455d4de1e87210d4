import numpy as np
import pytest

from surgery.common.errors import SurgeryError
from surgery.eval.bootstrap import paired_difference


def test_known_interval():
    """The mean of many normal differences: the interval is close to the normal one."""
    rng = np.random.default_rng(0)
    baseline = rng.normal(2, 1, 400)
    difference = paired_difference(baseline + rng.normal(0.1, 0.5, 400), baseline)
    half = 1.96 * 0.5 / 20
    assert difference.low == pytest.approx(difference.difference - half, abs=0.01)
    assert difference.high == pytest.approx(difference.difference + half, abs=0.01)


def test_pairing_takes_the_samples_own_spread_away():
    baseline = np.linspace(0, 100, 50)
    difference = paired_difference(baseline + 0.25, baseline)
    assert difference.difference == pytest.approx(0.25) and difference.high - difference.low < 1e-9


def test_equal_seeds_give_equal_intervals():
    values = np.random.default_rng(1).random((2, 30))
    assert paired_difference(*values, seed=4) == paired_difference(*values, seed=4)
    assert paired_difference(*values, seed=4) != paired_difference(*values, seed=5)


def test_one_sample_has_no_interval():
    difference = paired_difference([2.5], [2.0])
    assert (difference.difference, difference.low, difference.high, difference.samples) == (0.5, None, None, 1)


@pytest.mark.parametrize("pair", [([1.0], [1.0, 2.0]), ([], [])])
def test_unpaired_samples_are_refused(pair):
    with pytest.raises(SurgeryError, match="paired"):
        paired_difference(*pair)
