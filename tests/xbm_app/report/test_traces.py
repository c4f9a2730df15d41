import numpy as np
import pytest

from xbm_app.report.traces import over_seeds

NAN = float("nan")


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
