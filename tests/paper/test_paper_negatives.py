from paper.blocks import Claim, Figure, Pictures
from paper.registry import EXPERIMENTS


def test_valid_negatives_from_batch_and_memory(drawn):
    figure, table, said = drawn("valid-negatives")
    assert [line["label"] for line in figure.data["panels"][0]["lines"]] == ["from the batch", "from the memory"]
    assert table.rows == [["efficientnet_lite0", "17", "8", "1,500", "1,000"]]
    assert isinstance(said, Claim) and "8 valid negatives a step from the batch and 1,000 from the memory" in said


def test_weights_are_compared_on_the_same_pairs(drawn):
    figure, table, _, said = drawn("ms-outliers")
    assert "multi-similarity gives the hardest one 75.0 %, contrastive 25.0 %" in said
    assert isinstance(figure, Figure) and len(figure.data["panels"]) == 2
    assert table.rows[0][1:] == ["100", "4.0", "25.0", "50.0", "10.0"] and table.rows[1][3] == "75.0"
    assert not any("triplet" in row[0] for row in table.rows)  # it had no anchor to tell about


def test_mined_negatives_are_rows_of_pictures_and_their_absence_is_told(drawn):
    uniform, hardest = drawn("mined")
    assert isinstance(uniform, Pictures) and "no anchor" in hardest
    assert len(uniform.rows) == 1  # of the two anchors with one positive, and so of one class
    assert [(tile.image, tile.frame, tile.words) for tile in uniform.rows[0]] == [
        (1, "anchor", "anchor"), (2, "positive", "positive"), (3, "batch", "0.40"), (4, "batch", "0.30"),
        (5, "memory", "0.90"), (6, "memory", "0.80"),
    ]  # fmt: skip


def test_where_both_fail_is_shown_and_all_outcomes_are_counted(drawn):
    said, fails = drawn("retrieved")
    assert (
        "of 3 queries" in said
        and "right in both runs for 1, only with memory for 0, only without for 0, in neither for 2" in said
    )
    assert isinstance(fails, Pictures) and [len(row) for row in fails.rows] == [3, 3, 0, 3, 3]  # without and with, twice
    assert fails.rows[0][0].image == 7 and [tile.frame for tile in fails.rows[0]] == ["anchor", "wrong", "right"]
    assert fails.rows[0][2].words == "0.80 right" and fails.rows[0][1].words == "0.90"
    assert [row[0].words for row in fails.rows[:2]] == ["without", "with"]


def test_nothing_run_nothing_drawn():
    for name in ("valid-negatives", "ms-outliers", "mined", "retrieved"):
        assert EXPERIMENTS[name].draw("sop", []) == []
