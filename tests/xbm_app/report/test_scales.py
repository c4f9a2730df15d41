import math

import numpy as np
import pytest

from xbm_app.report.scales import counts, linear, ranks


def test_linear_axis_ends_at_round_values_that_enclose_the_data():
    scale = linear([61.3, 68.9])
    assert (scale.low, scale.high) == (60, 70)
    assert scale.ticks == (60, 62, 64, 66, 68, 70)


def test_snug_axis_ends_at_the_data_and_ticks_inside():
    scale = linear([10, 1495], zero=True, snug=True)
    assert (scale.low, scale.high) == (0, 1495)
    assert scale.ticks == (0, 500, 1000)


def test_values_keep_their_proportions_on_the_axis():
    placed = linear([0, 10]).place(np.array([0, 2.5, 10]), 200, 100)
    assert placed.tolist() == [200, 175, 100]


@pytest.mark.parametrize("values", [[7.0], [0.0], [-3.0, -3.0], [1e-9, 1e-9], []])
@pytest.mark.parametrize("zero", [False, True])
def test_an_axis_of_one_value_or_none_still_has_an_extent(values, zero):
    scale = linear(values, zero=zero)
    assert scale.low < scale.high and len(scale.ticks) >= 2
    assert all(scale.low <= v <= scale.high for v in values)
    assert np.isfinite(scale.place(np.array(values or [0.5]), 0, 1)).all()


def test_values_that_are_not_finite_do_not_stretch_an_axis():
    assert linear([math.nan, 1, math.inf, 2]).high == 2


def test_tick_labels_carry_no_rounding_noise():
    assert linear([0, 0.7]).ticks == (0, 0.2, 0.4, 0.6, 0.8)


def test_ranks_are_spaced_by_doubling():
    scale = ranks(32)
    gaps = np.diff(scale.place(np.array([1, 2, 4, 8, 16, 32]), 0, 100))
    assert scale.ticks == (1, 2, 4, 8, 16, 32)
    assert gaps == pytest.approx(np.full(5, 20))
    assert ranks(1000).ticks == (1, 10, 100, 1000)
    assert ranks(1).high > 1


def test_counts_axis_has_a_zero_below_its_decades():
    scale = counts([0, 3758, math.nan])
    assert scale.ticks == (0, 1, 10, 100, 1000, 10000)
    placed = scale.place(np.array(scale.ticks), 0, 5)
    assert placed == pytest.approx([0, 1, 2, 3, 4, 5])
    assert scale.place(np.array([0.5]), 0, 5) == pytest.approx([0.5])


def test_counts_that_are_all_zero_still_have_an_axis():
    assert counts([0, 0]).ticks == (0, 1, 10)
