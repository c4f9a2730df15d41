"""Against scipy.stats, against tables of the t distribution, and by hand."""

import doctest
import math

import numpy as np
import pytest
from scipy import stats

from paper import statistics
from paper.statistics import (
    Gain,
    between,
    class_bootstrap,
    equivalence_p,
    holm,
    p_value,
    paired_gain,
    points,
    t_quantile,
    welch_gain,
)
from xbm.errors import InputError

ONE = {0: 0.706, 1: 0.676, 2: 0.709, 3: 0.694, 4: 0.684}
OTHER = {0: 0.749, 1: 0.745, 2: 0.729, 3: 0.735, 5: 0.744}  # seed 4 is missing, 5 is extra


def test_the_quantile_is_that_of_the_tables():
    assert t_quantile(0.975, 2) == pytest.approx(4.303, abs=5e-4)  # three seeds: 4.3 standard errors, not 2
    assert t_quantile(0.975, 4) == pytest.approx(2.776, abs=5e-4)
    assert t_quantile(0.975, 1) == pytest.approx(12.706, abs=5e-4)
    assert t_quantile(0.975, math.inf) == pytest.approx(1.96, abs=5e-4)


def test_a_paired_gain_is_that_of_the_seeds_that_both_have():
    gain = paired_gain(ONE, OTHER)
    shared = [0, 1, 2, 3]
    expected = stats.ttest_rel([OTHER[s] for s in shared], [ONE[s] for s in shared])
    low, high = expected.confidence_interval(0.95)
    assert gain.seeds == 4 and gain.freedom == 3 and gain.paired
    assert gain.p == pytest.approx(expected.pvalue) and gain.interval() == pytest.approx((low, high))
    assert gain.sign == 1 and paired_gain(OTHER, ONE).sign == -1


def test_independent_seeds_have_welchs_test():
    one, other = [0.5, 0.52, 0.49], [0.55, 0.61, 0.5, 0.58]
    gain, expected = welch_gain(one, other), stats.ttest_ind(other, one, equal_var=False)
    assert gain.p == pytest.approx(expected.pvalue) and gain.freedom == pytest.approx(expected.df)
    assert gain.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert not gain.paired and gain.seeds == 3 and gain.sign == 0  # p is 0.08


def test_two_standard_errors_are_not_enough_for_three_seeds():
    assert Gain(0.03, 0.01, 2, 3).sign == 0 and Gain(0.043, 0.01, 2, 3).sign == 0
    assert Gain(0.0431, 0.01, 2, 3).sign == 1 and Gain(-0.0431, 0.01, 2, 3).sign == -1
    assert Gain(0.03, 0.01, 4, 5).sign == 1  # five seeds: 2.8


def test_too_few_seeds_give_no_test():
    single = paired_gain({0: 0.5}, {0: 0.6, 1: 0.7})
    assert not single.tested and math.isnan(single.p) and single.sign == 0 and all(map(math.isnan, single.interval()))
    assert paired_gain({0: 0.5}, {1: 0.6}) is None and welch_gain([], [0.5]) is None
    assert not welch_gain([0.5], [0.6, 0.7]).tested and math.isnan(equivalence_p(single))


def test_seeds_that_all_agree():
    same = Gain(0.1, 0.0, 2, 3)
    assert same.p == 0 and same.sign == 1 and same.interval() == (0.1, 0.1)
    nothing = Gain(0.0, 0.0, 2, 3)
    assert nothing.p == 1 and nothing.sign == 0 and equivalence_p(nothing) == 0 and equivalence_p(same) == 1


@pytest.mark.parametrize(("mean", "equal"), [(0.0, True), (0.004, True), (0.009, False), (-0.02, False)])
def test_equivalence_is_a_90_per_cent_interval_within_the_margin(mean, equal):
    gain = Gain(mean, 0.002, 4, 5)
    low, high = gain.interval(0.90)
    assert (equivalence_p(gain, 0.01) < 0.05) == equal == (low > -0.01 and high < 0.01)


def test_equivalence_is_the_larger_of_two_one_sided_tests():
    differences = np.array([0.002, 0.004, -0.001, 0.003])
    gain = paired_gain(dict.fromkeys(range(4), 0.0), dict(enumerate(differences)))
    above = stats.ttest_1samp(differences, -0.01, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, 0.01, alternative="less").pvalue
    assert equivalence_p(gain, 0.01) == pytest.approx(max(above, below))
    with pytest.raises(InputError, match="margin must be positive"):
        equivalence_p(gain, 0.0)


def test_holm_by_hand():
    # sorted: 0.004 × 4 = 0.016, 0.01 × 3 = 0.03, 0.02 × 2 = 0.04, 0.035 × 1 is less than the one before
    values = {"a": 0.02, "b": 0.004, "c": 0.035, "d": 0.01}
    assert holm(values) == pytest.approx({"a": 0.04, "b": 0.016, "c": 0.04, "d": 0.03})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0} and holm({}) == {}


def test_hypotheses_that_are_not_tested_yet_count_as_p_1():
    three = {"a": 0.001, "b": 0.02, "c": 0.3}
    six = holm({**three, "d": 1.0, "e": 1.0, "f": 1.0})
    assert holm(three, family=6) == pytest.approx({name: six[name] for name in three})
    assert holm(three, family=6)["b"] == pytest.approx(0.1)
    with pytest.raises(InputError, match="at least the number of p-values, 3"):
        holm(three, family=2)


def hits(rates: list[float], labels: np.ndarray, seeds: int = 3) -> np.ndarray:
    """(seeds, queries): the share of each class that is right, spread evenly."""
    rows = [np.concatenate([np.arange((labels == c).sum()) < rate * (labels == c).sum() for c, rate in enumerate(rates)])]
    return np.array(rows * seeds)


def test_the_bootstrap_draws_classes_and_not_queries():
    labels = np.repeat(np.arange(20), 50)
    base = hits([0.5] * 20, labels)
    half = hits([0.7] * 10 + [0.3] * 10, labels)  # half of the classes gain 20 points, the others lose 20
    low, high = class_bootstrap(base, half, labels)
    # the gain is 40 · k / 20 − 20 points, where k, the gaining classes among 20 drawn, is binomial: 95 % lie from 6 to 14.
    # Drawing queries instead would give ±2.5 points.
    assert (low, high) == pytest.approx((-0.08, 0.08))
    even = hits([0.6] * 20, labels)  # all classes gain the same: nothing to draw
    assert class_bootstrap(base, even, labels) == pytest.approx((0.1, 0.1))
    assert class_bootstrap(base, half, labels) == (low, high)  # the same every time


def test_a_large_class_weighs_as_many_queries_as_it_has():
    labels = np.array([0] * 90 + [1] * 10)
    one, other = hits([0.0, 0.0], labels), hits([1.0, 0.0], labels)
    values = {round(v, 6) for d in range(40) for v in class_bootstrap(one, other, labels, draws=1, seed=d)}
    assert values == {0.0, 0.9, 1.0}  # both the small one, one of each, both the large one


def test_unequal_seeds_and_odd_orders_of_queries():
    labels = np.array([3, 1, 3, 3, 1])
    one, other = np.array([[1, 0, 1, 0, 0]]), np.array([[1, 1, 1, 0, 1], [1, 1, 0, 0, 1]])
    # gains per query 0, 1, −0.5, 0, 1: −0.5 over the 3 queries of class 3, and 2 over the 2 of class 1
    values = {round(v, 6) for d in range(40) for v in class_bootstrap(one, other, labels, draws=1, seed=d)}
    assert values == {round(-1 / 6, 6), 0.3, 1.0}
    with pytest.raises(InputError, match="one column per query"):
        class_bootstrap(one, other, labels[:3])


def test_they_are_written_one_way():
    assert p_value(0.0004) == "p < 0.001" and p_value(0.04321) == "p = 0.043" and p_value(1.0) == "p = 1"
    assert points(0.0474) == "+4.7" and points(-0.013) == "−1.3" and points(-0.0001) == "0.0"
    assert between((0.0271, 0.0684)) == "+2.7 to +6.8"


def test_the_examples_run():
    assert doctest.testmod(statistics).failed == 0
