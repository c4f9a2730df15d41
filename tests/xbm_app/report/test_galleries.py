import numpy as np

from xbm_app.report import Doubtful, Match, Mined, Query, RunView
from xbm_app.report.galleries import doubts, mining, retrieval
from xbm_app.report.groups import compare, group_runs
from xbm_app.report.pictures import Encoder

ENCODE = Encoder(8, 50)
GREY = np.full((5, 7), 128, np.uint8)


def made(group, memory, recall, keys=(), mined=(), doubtful=()):
    queries = [Query(key, GREY, [Match(GREY, 0.5, True)]) for key in keys]
    return RunView(group, group, "MS", memory, 0, recall={"recall@1": recall}, queries=queries, mined=mined, doubtful=doubtful)


def negatives(*similarities):
    return [Match(GREY, s) for s in similarities]


def test_the_hardest_negatives_of_both_sources_are_averaged_over_the_anchors_that_have_one():
    mined = [Mined(GREY, GREY, negatives(0.5, 0.6), negatives(0.7, 0.9)), Mined(GREY, GREY, [], negatives(0.8, 0.3))]
    told = mining(group_runs([made("m", True, 0.7, mined=mined)]), [], ENCODE)
    assert "0.60 from the batch (1 of 2 anchors have one), 0.85 from the memory (2 of 2 anchors have one)." in told


def test_labels_in_doubt_are_those_of_the_best_run_that_has_some():
    low, high = ([Doubtful(f"{name} {k}", GREY, "a", "b", [], []) for k in range(14)] for name in ("low", "high"))
    groups = group_runs([made("l", True, 0.5, doubtful=low), made("h", True, 0.7, doubtful=high), made("n", True, 0.9)])
    shown = doubts(groups, ENCODE)
    assert shown.count("image high") == 12 and "image low" not in shown and "8 more images" in shown
    assert doubts(group_runs([made("n", True, 0.9)]), ENCODE) is None


def test_without_a_comparison_the_queries_of_the_best_group_are_shown():
    groups = group_runs([made("low", True, 0.5, ["of low"]), made("high", True, 0.7, ["of high"]), made("none", True, 0.6)])
    shown = retrieval(groups, compare(groups), ENCODE)
    assert "query of high" in shown and "query of low" not in shown


def test_only_queries_that_both_sides_answered_stand_side_by_side():
    groups = group_runs([made("a", False, 0.5, ["one", "both"]), made("b", True, 0.7, ["both", "other"])])
    shown = retrieval(groups, compare(groups), ENCODE)
    assert "query both" in shown and "query one" not in shown and "query other" not in shown
