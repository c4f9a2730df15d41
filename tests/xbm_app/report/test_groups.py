import math

import numpy as np
import pytest

from xbm.errors import InputError
from xbm_app.report.groups import RunView, Trace, compare, group_runs, mean_and_error, over_seeds, summarize, together

NAN = float("nan")


def runs(label, memory, values, loss="contrastive", reduction="mean", seeds=None):
    return [
        RunView(f"{label}-{s}", label, loss, memory, s, reduction, recall={} if math.isnan(v) else {"recall@1": v})
        for s, v in zip(seeds or range(len(values)), values)
    ]


def test_the_error_of_a_gain_is_taken_seed_by_seed():
    groups = group_runs(runs("a", False, [0.50, 0.60, 0.70]) + runs("b", True, [0.55, 0.65, 0.78]))
    gain = compare(groups)[0].gain
    assert gain.mean == pytest.approx(0.06)
    assert gain.error == pytest.approx(0.01)  # of 0.05, 0.05, 0.08: far less than of the six values apart


def test_seeds_that_do_not_match_are_compared_as_independent_means():
    groups = group_runs(runs("a", False, [0.50, 0.60]) + runs("b", True, [0.55, 0.65], seeds=[4, 5]))
    assert compare(groups)[0].gain.error == pytest.approx(math.hypot(0.05, 0.05))


def test_each_side_is_represented_by_its_better_setting():
    groups = group_runs(
        runs("mean", False, [0.5, 0.5], reduction="mean")
        + runs("sum", False, [0.6, 0.6], reduction="sum")
        + runs("mean+", True, [0.7, 0.7], reduction="mean")
        + runs("sum+", True, [0.2, 0.2], reduction="sum")
    )
    (comparison,) = compare(groups)
    assert (comparison.without.label, comparison.with_memory.label) == ("sum", "mean+")


def test_a_setting_with_several_seeds_stands_before_one_lucky_run():
    groups = group_runs(runs("three", False, [0.5, 0.5, 0.5]) + runs("one", False, [0.6]) + runs("m", True, [0.7, 0.7, 0.7]))
    assert compare(groups)[0].without.label == "three"


@pytest.mark.parametrize(
    ("with_memory", "outcome"),
    [
        ([0.64, 0.66, 0.65], "gain"),
        ([0.55, 0.56, 0.54], "loss"),
        ([0.60, 0.62, 0.64], "same"),
        ([0.6001, 0.6001, 0.6001], "same"),
    ],
)
def test_a_difference_counts_beyond_two_standard_errors(with_memory, outcome):
    groups = group_runs(runs("a", False, [0.6, 0.6, 0.6]) + runs("b", True, with_memory))
    assert compare(groups)[0].outcome == outcome


def test_losses_that_ran_only_one_way_are_not_compared():
    assert compare(group_runs(runs("a", False, [0.6]) + runs("b", True, [0.7], loss="MS"))) == []


def test_runs_without_a_result_do_not_count_but_stay_in_their_group():
    groups = group_runs(runs("a", False, [0.6, math.nan, 0.8]) + runs("b", True, [0.7, 0.7, 0.7]))
    assert groups[0].recall_at_1.count == 2 and len(groups[0].runs) == 3
    assert compare(groups)[0].gain.mean == pytest.approx(0)


def test_groups_stand_by_loss_then_reduction_then_memory():
    made = (
        runs("b+", True, [0.1], loss="MS")
        + runs("a+", True, [0.1])
        + runs("a", False, [0.1])
        + runs("b", False, [0.1], loss="MS")
    )
    assert [group.label for group in group_runs(made)] == ["b", "b+", "a", "a+"]


def test_a_label_for_two_settings_is_refused():
    with pytest.raises(InputError, match="its own label"):
        group_runs(runs("a", False, [0.6]) + runs("a", True, [0.7]))
    with pytest.raises(InputError, match="at least one run"):
        group_runs([])


def test_a_reduction_that_ran_with_memory_alone_stands_beside_the_best_without():
    def named(label, memory, reduction, value):
        return RunView(label, label, "contrastive", memory, 0, reduction, {"recall@1": value})

    made = [named("a", False, "mean", 0.6), named("b", False, "sum", 0.5), named("c", True, "balanced", 0.7)]
    panels = [[group.label for group in panel] for panel in together(group_runs([*made, named("d", True, "sum", 0.3)]))]
    assert panels == [["a", "c"], ["b", "d"]]
    assert [[group.label for group in panel] for panel in together(group_runs(made[2:]))] == [["c"]]


def test_settled_is_the_median_of_the_last_quarter():
    step = np.arange(0, 101, 5)
    values = np.where(step < 75, 1000.0, step)
    values[-1] = np.nan
    run = RunView("r", "g", "MS", True, 0, trace=Trace(step=step, valid_negatives_memory=values))
    assert group_runs([run])[0].settled("valid_negatives_memory") == 85
    assert math.isnan(group_runs([run])[0].settled("drift_10"))


def test_a_series_of_another_length_than_its_steps_is_refused():
    with pytest.raises(InputError, match="loss must be empty or have one value per step"):
        Trace(step=np.arange(3), loss=np.zeros(2))


def test_an_unknown_severity_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'warning'"):
        RunView("r", "g", "MS", True, 0, notes=[("warn", "x")])


# ------------------------------------------------------------------ statistics over seeds


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
