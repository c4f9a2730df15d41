import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from xbm.errors import InputError
from xbm_app.report.galleries import Encoder, doubtful_row, doubts, mined_row, mining, query_row, retrieval
from xbm_app.report.groups import Doubtful, Match, Mined, Query, RunView, compare, group_runs

ENCODE = Encoder(40, 60)
GREY = np.full((31, 17), 128, np.uint8)


def opened(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/webp;base64,"))))


@pytest.mark.parametrize(
    ("picture", "size"),
    [
        (GREY, (17, 31)),
        (np.zeros((200, 100, 3), np.uint8), (20, 40)),
        (Image.new("RGBA", (80, 20)), (40, 10)),
        (Image.new("P", (5, 7)), (5, 7)),
    ],
)
def test_pictures_of_any_kind_are_shrunk_and_never_enlarged(picture, size):
    assert opened(ENCODE(picture)).size == size


def test_a_picture_that_is_given_is_left_as_it_was():
    image = Image.new("RGB", (300, 300))
    ENCODE(image)
    assert image.size == (300, 300)


@pytest.mark.parametrize("picture", [np.zeros((4, 4)), np.zeros((4, 4, 4), np.uint8), np.zeros(4, np.uint8)])
def test_an_array_that_is_no_picture_is_refused(picture):
    with pytest.raises(InputError, match="uint8, got"):
        ENCODE(picture)


def test_right_and_wrong_differ_by_frame_by_sign_and_in_words():
    query = Query("q<1>", GREY, [Match(GREY, 0.9, True), Match(GREY, -0.12, False)])
    row = query_row(query, [("without memory", query), ("with memory", query)], ENCODE)
    assert row.count('class="frame right"') == row.count('href="#check"') == row.count("rank 1: right class") == 2
    assert row.count('class="frame wrong"') == row.count('href="#cross"') == row.count("rank 2: wrong class") == 2
    assert "0.90" in row and "−0.12" in row
    assert "query q&lt;1&gt;" in row


def test_negatives_stand_by_similarity_and_their_source_is_told():
    mined = Mined(GREY, None, [], [Match(GREY, s) for s in (0.61, 0.93, 0.72)])
    row = mined_row(mined, 1, ENCODE)
    assert row.index("0.93") < row.index("0.72") < row.index("0.61")
    assert "no valid negative" in row and row.count('class="frame memory"') == 3 and 'class="frame batch"' not in row


def test_a_label_in_doubt_stands_between_its_class_and_the_one_it_lies_among():
    row = doubtful_row(Doubtful("a<1>.png", GREY, "ca<t", "dog", [], [Match(GREY, s) for s in (0.9, -0.12)]), ENCODE)
    labelled, among = (row.index(words) for words in ("labeled <b>ca&lt;t</b>", "nearest class <b>dog</b>"))
    assert row.index("image a&lt;1&gt;.png") < labelled < row.index("no other image") < among < row.index("0.90")
    assert row.count('alt="of dog"') == 2 and "−0.12" in row


def test_no_more_than_eight_pictures_stand_in_a_row():
    query = Query("q", GREY, [Match(GREY, 0.5, True)] * 30)
    assert query_row(query, [("nearest first", query)], ENCODE).count("<img") == 1 + 8


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


def answered(group, memory, recall, right, seed=0):
    """A run that gets the queries right that are marked so; it shows all of them."""
    queries = [Query(f"{k}!", GREY, [Match(GREY, 0.5, ok)]) for k, ok in enumerate(right)]
    return RunView(
        group, group, "MS", memory, seed, recall={"recall@1": recall}, queries=queries, chosen="By lot.", right=np.array(right)
    )


def test_queries_that_one_side_alone_gets_right_come_first_in_the_proportion_of_all():
    base = answered("b", False, 0.5, [False, False, True, True, False, False, False])
    memory = answered("m", True, 0.6, [False, True, False, True, True, True, True])
    groups = group_runs([base, memory])
    shown = retrieval(groups, compare(groups), ENCODE)
    assert "By lot. Over all 7 queries, the nearest image has the right class only with memory for 4, and only" in shown
    assert "without for 1; such queries come first" in shown and "does not show" not in shown
    order = [int(key) for key in re.findall(r"query (\d)!", shown)]
    assert order == [1, 4, 2, 5, 6, 0, 3]


def test_a_gallery_that_contradicts_the_headline_says_so():
    """Of three seeds one, whose pictures are shown, is worse with memory."""
    runs = [answered("b", False, 0.5 + 0.01 * seed, [False, True], seed) for seed in range(3)]
    runs += [answered("m", True, recall, [False, False], seed) for seed, recall in enumerate((0.49, 0.8, 0.9))]
    groups = group_runs(runs)
    shown = retrieval(groups, compare(groups), ENCODE)
    assert "only with memory for 0" in shown and "does not show the difference that the page starts with" in shown


def test_several_galleries_show_fewer_rows_each():
    runs = [
        RunView(f"{loss}{memory}", f"{loss}{memory}", loss, memory, 0, recall={"recall@1": 0.5}, queries=queries)
        for loss in ("MS", "triplet") for memory in (False, True)
        for queries in [[Query(f"{k}!", GREY, [Match(GREY, 0.5, True)]) for k in range(5)]]
    ]  # fmt: skip
    one, two = (retrieval(groups := group_runs(some), compare(groups), ENCODE) for some in (runs[:2], runs))
    assert re.findall(r"(\d) more queries", one) == ["1"] and re.findall(r"(\d) more queries", two) == ["3", "3"]
