import math
from dataclasses import replace

import pytest

from paper.experiment import OFF, Arm, Experiment, Setting
from paper.record import Records, identity
from paper.study import Choice, Spread, Study, Task, paired, plan
from tests.paper.made_up import CARS, carry_out, invented

ARMS = (Arm("off", OFF), Arm("on", {"memory.update": "queue"}), Arm("never", {"batch.size": 12}, choose=None))
EXPERIMENT = Experiment("x", "", "", ("cars",), lambda setting: ARMS[:2], lambda data, studies: [])


def test_the_best_rate_is_picked_and_the_smaller_of_two_equals():
    assert Choice((1.0, 2.0, 3.0), (0.1, 0.3, 0.2)).picked == 2.0
    assert Choice((1.0, 2.0, 3.0), (0.3, 0.3, 0.2)).picked == 1.0
    assert Choice((1.0, 2.0), (0.0, 0.0)).picked == 1.0


def test_a_choice_says_when_it_lies_at_the_edge():
    assert Choice((1.0, 2.0, 3.0), (0.1, 0.2, 0.3)).at_edge and not Choice((1.0, 2.0, 3.0), (0.1, 0.3, 0.2)).at_edge
    assert not Choice((1.0,), (0.1,)).at_edge


def test_the_budget_is_told():
    summary = Choice((1.0, 2.0), (0.25, 0.5)).to_dict()
    assert summary["picked"] == 2.0 and summary["runs"] == 2 and summary["scores"] == [0.25, 0.5] and summary["seed"] == 0


def test_spread_by_hand():
    spread = Spread({0: 0.5, 1: 0.6, 2: 0.7})
    assert spread.mean == pytest.approx(0.6) and spread.error == pytest.approx(0.1 / math.sqrt(3)) and len(spread) == 3
    assert math.isnan(Spread({4: 0.5}).error)


def test_gains_are_taken_seed_by_seed():
    gain = paired(Spread({0: 0.5, 1: 0.6, 3: 0.9}), Spread({0: 0.6, 1: 0.9, 2: 0.1}))
    assert gain.by_seed == pytest.approx({0: 0.1, 1: 0.3})


def test_a_study_finds_its_runs_by_what_they_are(tmp_path):
    records = Records(tmp_path)
    study = Study(EXPERIMENT, CARS, records)
    assert study.choice(ARMS[0]) is None and study.config(ARMS[0], 0) is None and not study.spread(ARMS[0])
    carry_out([EXPERIMENT], [CARS], 3, records)
    assert study.choice(ARMS[0]).picked == 1e-4
    assert [run.seed for run in study.runs(ARMS[0])] == [0, 1, 2]
    off, on = study.spread(ARMS[0]), study.spread(ARMS[1])
    assert paired(off, on).mean == pytest.approx(0.1)
    assert study.spread(ARMS[0], "recall@2").mean == pytest.approx(off.mean + 0.01)
    assert study.choosing(ARMS[2]) == [] and study.choice(ARMS[2]) is None and study.runs(ARMS[2]) == []


def choose(records, scores):
    """Makes the runs of a choice by `scores`, R@1 by rate; the rates of each round."""
    study, rounds = Study(EXPERIMENT, CARS, records), []
    while missing := [config for config in study.choosing(ARMS[0]) if records.find(identity(config)) is None]:
        rounds.append([config.optim.lr for config in missing])
        for config in missing:
            records.write(invented(Task(config), lambda config: scores[config.optim.lr]))
    return study, rounds


def test_a_choice_at_the_edge_extends_the_grid_at_most_twice(tmp_path):
    rising = {3e-5: 0.1, 1e-4: 0.2, 3e-4: 0.3, 1e-3: 0.4, 3e-3: 0.5}
    study, rounds = choose(Records(tmp_path / "up"), rising)
    assert rounds == [[3e-5, 1e-4, 3e-4], [1e-3], [3e-3]] and study.choice(ARMS[0]).tried == tuple(rising)
    assert study.choice(ARMS[0]).picked == 3e-3 and study.choice(ARMS[0]).at_edge
    study, rounds = choose(Records(tmp_path / "down"), {1e-5: 0.4, 3e-5: 0.5, 1e-4: 0.3, 3e-4: 0.1})
    assert rounds == [[3e-5, 1e-4, 3e-4], [1e-5]] and study.choice(ARMS[0]).picked == 3e-5
    assert not study.choice(ARMS[0]).at_edge


def test_until_the_rate_beyond_the_edge_has_run_the_choice_is_the_one_at_the_edge(tmp_path):
    records = Records(tmp_path)
    for config in Study(EXPERIMENT, CARS, records).choosing(ARMS[0]):
        records.write(invented(Task(config), lambda config: config.optim.lr))
    study = Study(EXPERIMENT, CARS, records)
    assert study.choice(ARMS[0]).picked == 3e-4 and study.choice(ARMS[0]).at_edge
    (waiting,) = (config for config in study.choosing(ARMS[0]) if records.find(identity(config)) is None)
    assert waiting.optim.lr == 1e-3  # and no run on the test classes is planned before it
    only = Experiment("x", "", "", ("cars",), lambda setting: ARMS[:1], lambda data, studies: [])
    assert [task.config.optim.lr for task in plan([only], [CARS], 3, records).ready] == [1e-3]


def test_seeds_beyond_those_asked_for_count_too(tmp_path):
    records = Records(tmp_path)
    given = Experiment("x", "", "", ("cars",), lambda setting: ARMS[2:], lambda data, studies: [])
    for task in plan([given], [CARS], 5, records).ready[3:]:
        records.write(invented(task))
    assert [run.seed for run in Study(given, CARS, records).runs(ARMS[2])] == [3, 4]


# ------------------------------------------------------------------ the runs that are missing


def experiment(*arms: Arm, name: str = "x", elsewhere: bool = True) -> Experiment:
    return Experiment(name, "", "", ("cars",), lambda setting: arms, lambda data, studies: [], elsewhere)


PLAIN = Arm("plain", OFF)
GIVEN = Arm("given", {"optim.lr": 7e-4}, choose=None)


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path)


def test_first_learning_rates_are_chosen_on_held_out_classes_then_the_test_classes_are_met(records):
    first = plan([experiment(PLAIN)], [CARS], 3, records)
    assert [task.config.optim.lr for task in first.ready] == [3e-5, 1e-4, 3e-4]
    assert all(task.config.data.holdout == 0.2 and task.config.seed == 0 and task.chosen is None for task in first.ready)
    assert first.waiting == 3 and first.done == 0
    for task in first.ready[:2]:
        records.write(invented(task))
    assert len(plan([experiment(PLAIN)], [CARS], 3, records).ready) == 1  # what is there is skipped
    records.write(invented(first.ready[2]))
    then = plan([experiment(PLAIN)], [CARS], 3, records)
    assert [task.config.seed for task in then.ready] == [0, 1, 2] and then.waiting == 0 and then.done == 3
    assert all(task.config.optim.lr == 1e-4 and task.config.data.holdout == 0 for task in then.ready)
    assert then.ready[0].chosen["picked"] == 1e-4 and then.ready[0].chosen["tried"] == [3e-5, 1e-4, 3e-4]
    assert then.ready[0].chosen["runs"] == 3 and "held out" in then.ready[0].chosen["by"]


def test_a_given_learning_rate_is_not_chosen(records):
    now = plan([experiment(GIVEN)], [CARS], 2, records)
    assert [(t.config.optim.lr, t.config.seed, t.chosen) for t in now.ready] == [(7e-4, 0, None), (7e-4, 1, None)]


def test_experiments_share_runs_and_all_that_is_to_be_measured_on_them(records):
    one, other = replace(GIVEN, measures=("lemma",)), replace(GIVEN, label="other", measures=("mined",))
    now = plan([experiment(one), experiment(other, name="y")], [CARS], 2, records)
    assert [(task.config.seed, task.measures) for task in now.ready] == [(0, ("lemma", "mined")), (1, ())]


def test_a_run_that_lacks_a_measure_is_made_again_and_one_that_diverged_is_not(records):
    (task,) = plan([experiment(GIVEN)], [CARS], 1, records).ready
    records.write(invented(task))
    measured = experiment(replace(GIVEN, measures=("lemma",)))
    assert [t.measures for t in plan([measured], [CARS], 1, records).ready] == [("lemma",)]
    records.write({"config": identity(task.config), "failed": "iteration 3"})
    assert plan([measured], [CARS], 1, records).ready == []


def test_arms_can_share_a_choice(records):
    """Another sampler, the learning rate of the usual one."""
    shuffled = Arm("shuffled", {**OFF, "batch.sampler": "shuffle"}, {"batch.sampler": "pk"})
    now = plan([experiment(PLAIN, shuffled)], [CARS], 1, records)
    assert len(now.ready) == 3 and now.waiting == 2
    assert {task.config.batch.sampler for task in now.ready} == {"pk"}
    for task in now.ready:
        records.write(invented(task))
    assert [task.config.batch.sampler for task in plan([experiment(PLAIN, shuffled)], [CARS], 1, records).ready] == [
        "pk",
        "shuffle",
    ]


def test_seeds_come_in_rounds_and_an_arm_may_want_fewer(records):
    now = plan([experiment(GIVEN, replace(GIVEN, label="b", settings={"optim.lr": 1e-3}, seeds=1))], [CARS], 2, records)
    assert [(task.config.seed, task.config.optim.lr) for task in now.ready] == [(0, 7e-4), (0, 1e-3), (1, 7e-4)]


def test_data_that_an_experiment_says_nothing_about_is_left_out(records):
    glyphs = Setting("glyphs", "small", "none")
    assert plan([experiment(GIVEN, elsewhere=False)], [glyphs], 1, records).ready == []
    assert len(plan([experiment(GIVEN, elsewhere=False)], [CARS, replace(glyphs, mini=True)], 1, records).ready) == 2
    assert len(plan([experiment(GIVEN)], [glyphs], 1, records).ready) == 1


def test_when_everything_is_there_nothing_is_planned(records):
    assert carry_out([experiment(PLAIN, GIVEN)], [CARS], 2, records) == 3 + 2 + 2
    now = plan([experiment(PLAIN, GIVEN)], [CARS], 2, records)
    assert (now.ready, now.waiting, now.done) == ([], 0, 7)


def test_a_run_that_is_timed_is_alone(records):
    task = plan([experiment(GIVEN)], [CARS], 1, records).ready[0]
    assert not task.alone and all(Task(task.config, None, (each,)).alone for each in ("cost", "beside_queue"))
