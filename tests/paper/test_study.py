import math

import pytest

from paper.experiment import OFF, Arm, Experiment
from paper.plan import Task, plan
from paper.record import Records, identity
from paper.study import Choice, Spread, Study, paired
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
