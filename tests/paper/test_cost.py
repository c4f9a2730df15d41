from paper.cost import KINDS, draw_cost
from paper.record import Records
from paper.registry import EXPERIMENTS
from paper.study import Study
from tests.paper.made_up import CARS, carry_out


def test_time_and_memory_beside_the_papers(tmp_path):
    records = Records(tmp_path)
    carry_out([EXPERIMENTS["table-2"]], [CARS], 1, records)
    table, said = draw_cost("cars", [Study(EXPERIMENTS["table-2"], CARS, records)])
    rows = {row[0]: row[1:] for row in table.rows[:5]}
    assert rows["batch 64, R_M = 1"] == ["–", "3.19 h", "+0.2 GB", "77.4"]
    ours = table.rows[6:]
    assert [row[0] for row in ours] == list(KINDS)
    # 20 ms an iteration, 2,000 of them; the baseline's 3 GB in all, the others' beyond it
    assert ours[0] == ["batch 64", "20.0 ms", "0.7 min", "3.00 GB", "50.6"] and ours[3][3:] == ["+0.00 GB", "60.6"]
    assert "NVIDIA H200" in said


def test_timed_runs_have_the_machine_for_themselves(tmp_path):
    study = Study(EXPERIMENTS["table-2"], CARS, Records(tmp_path))
    timed = [arm for arm in study.arms if arm.label.endswith("timed")]
    assert len(timed) == 4 and all(arm.measures == ("cost",) and arm.choose is None for arm in timed)


def test_nothing_run_nothing_drawn():
    assert draw_cost("sop", []) == []
