import numpy as np
import pytest

from xbm_app.report.groups import RunView, Trace, compare, group_runs
from xbm_app.report.page import headline, left_out, reductions


def runs(memory, values, loss="contrastive", reduction="mean", negatives=(2, 3000), drift=0.4):
    step = np.arange(0, 100, 10)
    trace = Trace(
        step=step,
        valid_negatives_batch=np.full(10, float(negatives[0])),
        valid_negatives_memory=np.full(10, float(negatives[1])) if memory else np.empty(0),
        drift_100=np.full(10, drift),
    )
    label = f"{loss}, {reduction}, {'with' if memory else 'without'} memory"
    return [
        RunView(f"{label} {s}", label, loss, memory, s, reduction, {"recall@1": v}, iterations=100, trace=trace)
        for s, v in enumerate(values)
    ]


def said(*made):
    groups = group_runs([run for part in made for run in part])
    return headline(groups, compare(groups))


GAIN = runs(False, [0.60, 0.61, 0.626]) + runs(True, [0.66, 0.67, 0.674])
SAME = runs(False, [0.60, 0.60, 0.60], "MS") + runs(True, [0.59, 0.60, 0.62], "MS")
LOSS = runs(False, [0.60, 0.60, 0.60], "triplet") + runs(True, [0.55, 0.55, 0.56], "triplet")


def test_a_gain_is_told_with_its_error_and_seeds():
    assert said(GAIN) == "The memory raises R@1 from 61.2 to 66.8 for contrastive (+5.6 ± 0.4, 3 seeds)."


def test_no_difference_within_two_errors_is_told_as_such():
    assert said(SAME) == "The memory makes no clear difference to R@1 for MS (60.0 without, 60.3 with: +0.3 ± 0.9, 3 seeds)."


def test_a_memory_that_hurts_is_told_too():
    assert said(LOSS) == "The memory lowers R@1 from 60.0 to 55.3 for triplet (−4.7 ± 0.3, 3 seeds)."


def test_several_losses_share_one_sentence():
    more = runs(False, [0.5, 0.5], "circle") + runs(True, [0.6, 0.6], "circle")
    told = said(LOSS, SAME, GAIN, more)
    assert told.startswith("The memory raises R@1 from 61.2 to 66.8 for contrastive (")
    assert ") and from 50.0 to 60.0 for circle (+10.0 ± 0.0, 2 seeds); it lowers R@1 from 60.0" in told
    assert "; it makes no clear difference to R@1 for MS (" in told


def test_one_seed_claims_no_error():
    assert said(runs(False, [0.612]), runs(True, [0.668])) == (
        "The memory changes R@1 from 61.2 to 66.8 for contrastive (+5.6, one seed, so no error bar)."
    )


def test_a_single_run_says_what_it_reached():
    assert said(runs(True, [0.668])) == "R@1 is 66.8 after 100 iterations: contrastive, mean, with memory, one seed."


def test_settings_without_a_counterpart_name_the_best():
    told = said(runs(True, [0.668, 0.668]), runs(True, [0.7, 0.72], "MS"))
    assert told == "The best of 2 settings is MS, mean, with memory, with R@1 71.0 ± 1.0 (2 seeds)."


def test_runs_without_any_result_say_so():
    assert said([RunView("r", "g", "MS", True, 0)]) == "No run has a result yet."


def test_a_better_baseline_of_one_seed_is_named():
    groups = group_runs(GAIN + runs(False, [0.65], reduction="sum"))
    assert left_out(groups, compare(groups)) == [
        "Not compared, because one seed gives no standard error: contrastive, sum, without memory, R@1 65.0."
    ]
    assert left_out(group_runs(GAIN), compare(group_runs(GAIN))) == []


def explained(summed, averaged=0.68, sum_base=0.62, **more):
    made = runs(False, [0.62]) + runs(True, [averaged]) + runs(False, [sum_base], reduction="sum")
    return reductions(group_runs(made + runs(True, [summed], reduction="sum", **more)))


def test_a_sum_that_collapses_beside_a_mean_that_holds_is_explained_by_its_counts():
    ((heading, (seen, cause)),) = explained(0.24)
    assert heading == "Why the sum collapses and the mean does not (contrastive)"
    assert "R@1 24.0, and 62.0 without memory" in seen and "reaches 68.0" in seen
    assert "3,000 valid negatives from the memory and 2 from its batch" in cause and "outweigh so few positives" in cause


def test_a_balanced_form_that_holds_is_named_before_a_mean():
    made = runs(False, [0.62]) + runs(True, [0.66]) + runs(True, [0.70], reduction="balanced")
    ((heading, (seen, _)),) = reductions(group_runs(made + runs(True, [0.3], reduction="sum")))
    assert heading == "Why the sum collapses and the balanced reduction does not (contrastive)"
    assert "never outweigh the positives, it reaches 70.0" in seen


def test_a_sum_that_only_falls_is_not_called_a_collapse():
    assert explained(0.50)[0][0].startswith("Why the sum falls")


@pytest.mark.parametrize(("summed", "averaged"), [(0.68, 0.68), (0.615, 0.68), (0.24, 0.25)])
def test_no_explanation_where_the_sum_holds_or_the_mean_falls_too(summed, averaged):
    assert explained(summed, averaged) == []


def test_counts_that_do_not_bear_the_explanation_out_are_not_bent_to_it():
    cause = explained(0.24, negatives=(40, 90))[0][1][1]
    assert "is not visible here" in cause and "90 valid negatives from the memory and 40 from its batch" in cause


def test_the_explanation_does_without_figures_that_were_not_measured():
    nan = float("nan")
    cause = explained(0.24, negatives=(nan, nan), drift=nan)[0][1][1]
    assert "nan" not in cause and "–" not in cause and cause.startswith("With the sum, each valid negative")
