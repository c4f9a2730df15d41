import pytest

from paper.blocks import Claim, Figure, Table
from paper.cause import PUSHES, cause_arms, draw_cause, ratio
from paper.experiment import setting_of
from paper.record import Record, Records
from paper.registry import BEYOND
from paper.study import Study
from tests.paper.made_up import CARS, carry_out

GLYPHS = setting_of("glyphs")


def test_the_ratio_of_the_two_sides_where_both_are_known():
    curves = {
        "step": [0, 1, 2, 3], "valid_negatives_memory": [None, 30.0, 40.0, 0.0],
        "valid_positives_memory": [None, 10.0, 0.0, 5.0],
    }  # fmt: skip
    assert ratio(Record({"config": {}, "curves": curves})) == ([1], [3.0])


def test_one_thing_is_changed_at_a_time():
    arms = {arm.label: dict(arm.settings) for arm in cause_arms(GLYPHS)}
    younger, summed = arms["summed, rows 8 times younger"], arms["summed"]
    assert younger.pop("memory.updates_per_step") == 8 and younger == summed
    assert len(arms) == 4 + len(PUSHES) and len(cause_arms(CARS)) == 3  # a pretrained trunk does not collapse


def test_the_cause_is_drawn_and_told(tmp_path):
    records = Records(tmp_path)
    carry_out([BEYOND["robustness-cause"]], [GLYPHS], 1, records)
    figure, table, said, _, parts, _ = draw_cause("glyphs", [Study(BEYOND["robustness-cause"], GLYPHS, records)])
    assert isinstance(figure, Figure) and isinstance(table, Table) and isinstance(said, Claim)
    assert parts.rows[1] == ["summed", "2.5", "0.5", "8", "30", "60", "55"]
    sides, *_, swept = figure.data["panels"]
    assert sides["lines"][0]["y"] == [20.0, 15.0, 10.0] and swept["lines"][0]["x"] == sorted([1.0, *PUSHES])
    assert table.rows[1][0] == "summed" and table.rows[1][2] == "10" and "weigh 10 times its positives" in said


def test_nothing_is_drawn_before_its_runs_are_there(tmp_path):
    assert draw_cause("glyphs", [Study(BEYOND["robustness-cause"], GLYPHS, Records(tmp_path))]) == []


@pytest.mark.parametrize("setting", [GLYPHS, CARS])
def test_the_cause_is_looked_for_on_held_out_classes(setting):
    assert all(arm.settings["data.holdout"] > 0 and arm.choose is None for arm in cause_arms(setting))
