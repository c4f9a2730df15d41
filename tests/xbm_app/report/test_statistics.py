import math

import numpy as np
import pytest

from xbm_app.report.statistics import (
    Stat,
    change,
    count,
    distance,
    duration,
    listed,
    loss_name,
    mean_and_error,
    over_seeds,
    percent,
    plus_minus,
    seeds,
    signed,
    summarize,
    times,
)  # fmt: skip

NAN = float("nan")


def test_mean_and_standard_error_are_those_of_the_textbook():
    stat = summarize([0.60, 0.62, 0.67])
    assert stat.mean == pytest.approx(0.63)
    assert stat.error == pytest.approx(math.sqrt((0.03**2 + 0.01**2 + 0.04**2) / 2 / 3))
    assert stat.count == 3 and mean_and_error([0.60, 0.62, 0.67]) == (stat.mean, stat.error)


def test_one_seed_has_no_standard_error_and_no_seed_no_mean():
    assert math.isnan(summarize([0.5]).error) and summarize([0.5]).mean == 0.5
    assert math.isnan(summarize([]).mean)


def test_seeds_are_averaged_step_by_step_and_their_range_is_kept():
    step = np.array([0, 10, 20])
    curve = over_seeds([(step, np.array([1.0, 2, 3])), (step, np.array([3.0, 2, 7]))])
    assert curve.x.tolist() == [0, 10, 20]
    assert curve.mean.tolist() == [2, 2, 5]
    assert curve.low.tolist() == [1, 2, 3] and curve.high.tolist() == [3, 2, 7]


def test_a_seed_that_did_not_measure_a_step_does_not_count_there():
    step = np.array([0, 10, 20])
    curve = over_seeds([(step, np.array([1.0, NAN, NAN])), (step[:2], np.array([3.0, 5])), (step, np.array([]))])
    assert curve.mean[:2].tolist() == [2, 5]
    assert len(curve.mean) == 3 and np.isnan(curve.mean[2]) and np.isnan(curve.low[2])


def test_long_series_are_averaged_in_bins_of_equal_length():
    step = np.arange(1001)
    curve = over_seeds([(step, step.astype(float))], bins=150)
    assert len(curve.x) == 143  # 7 steps each
    assert curve.x == pytest.approx(curve.mean)
    assert curve.x[0] == 3


def test_a_value_that_is_not_finite_is_a_gap():
    curve = over_seeds([(np.arange(3), np.array([1.0, np.inf, 2.0]))])
    assert np.isnan(curve.mean[1]) and curve.mean[2] == 2


@pytest.mark.parametrize("values", [[], [NAN, NAN]])
def test_nothing_measured_is_no_curve(values):
    assert over_seeds([(np.arange(2), np.array(values))]) is None


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(0.66849), "66.8"),
        (percent(math.nan), "–"),
        (signed(0.056), "+5.6"),
        (signed(-0.003), "−0.3"),
        (signed(-0.0001), "0.0"),
        (signed(0.1003), "+10.0"),
        (plus_minus(Stat(0.668, 0.0042, 3)), "66.8 ± 0.4"),
        (plus_minus(Stat(0.668, 0.0002, 3)), "66.8 ± 0.02"),
        (plus_minus(Stat(0.668, math.nan, 1)), "66.8"),
        (count(3758.4), "3,758"),
        (count(1.94), "1.9"),
        (count(0.125), "0.12"),
        (count(0), "0"),
        (times(310.4), "310 times"),
        (times(1.44), "1.4 times"),
        (duration(0.0413), "41.3 ms"),
        (duration(0.00002), "0.02 ms"),
        (duration(61), "61.0 s"),
        (duration(5400), "1 h 30 min"),
        (duration(math.nan), "–"),
        (distance(0.0213), "0.021"),
        (distance(1.234), "1.23"),
        (change(2.0, 2.5), "+25\u00a0%"),
        (change(2.0, 1.0), "−50\u00a0%"),
        (seeds(1), "one seed"),
        (seeds(3), "3 seeds"),
        (loss_name("multi_similarity"), "multi similarity"),
        (loss_name("ms"), "MS"),
        (listed(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_figures_are_written_one_way(written, expected):
    assert written == expected
