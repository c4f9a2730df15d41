from dataclasses import replace

import pytest

from paper.experiment import OFF, Arm, Experiment, Setting
from paper.plan import Task, plan
from paper.record import Records, identity
from tests.paper.made_up import CARS, carry_out, invented


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
