import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paper.experiment import GLYPHS, Setting, config_of
from paper.experiments import EXPERIMENTS
from paper.experiments.tuning import (
    LETTER,
    TUNED,
    Budget,
    best_rates,
    choosing_config,
    curve_of,
    label_of,
    mean_curve,
    next_rate,
    tuned_arms,
)
from paper.record import Records, folder_name, identity, unpacked
from paper.study import Study, Task, plan
from paper.workers import execute
from tests.paper.made_up import invented
from xbm_app.train import loop
from xbm_app.train.config import check, override
from xbm_app.train.dataset import read_run

EXPERIMENT = EXPERIMENTS["s-table-3-tuned"]
CARS = Setting("cars", "googlenet_bvlc", "googlenet_bvlc_fp16.safetensors")
CUB = replace(CARS, data="cub")
BUDGET = Budget()
POINTS = range(BUDGET.every, BUDGET.full + 1, BUDGET.every)


def arm_of(setting, loss="contrastive", memory=False, kind=TUNED):
    return {arm.label: arm for arm in tuned_arms(setting)}[label_of(loss, memory, kind)]


def write(records, config, curve, failed=False):
    """A finished run with this curve of MAP@R by iteration."""
    values = invented(Task(config))
    steps = [t - 1 for t in curve if t <= config.optim.iterations]
    scores = {"curves": {"step": steps, "map@r": [curve[step + 1] for step in steps]}}
    records.write({"config": values["config"], "failed": "iteration 3"} if failed else {**values, **scores})


def play(setting, arm, records, score, failing=lambda config: False):
    """Makes every run of the choice by `score(rate, iteration, fold)`; the configs of each round."""
    rounds = []
    while True:
        progress = arm.tune(setting, arm, records)
        missing = [config for config in progress.runs if records.find(identity(config)) is None]
        if not missing:
            return progress, rounds
        rounds.append(missing)
        for config in missing:
            curve = {t: score(config.optim.lr, t, config.data.fold) for t in POINTS}
            write(records, config, curve, failing(config))


def peak(best_rate, best_length):
    """The highest score at one rate and one length."""

    def score(rate, iteration, fold):
        return round(0.5 - 0.05 * abs(np.log10(rate / best_rate)) - abs(iteration - best_length) / 1e5 - 0.01 * fold, 6)

    return score


def test_five_rates_then_three_at_full_length_then_two_on_the_other_fold(tmp_path):
    progress, rounds = play(CARS, arm_of(CARS), Records(tmp_path), peak(1e-4, 2500))
    brief = [[(c.optim.lr, c.optim.iterations, c.data.fold) for c in each] for each in rounds]
    assert brief[0] == [(rate, 1000, 0) for rate in (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)]
    assert sorted(brief[1]) == [(3e-5, 4000, 0), (1e-4, 4000, 0), (3e-4, 4000, 0)]
    assert (
        len(brief) == 3 and {rate for rate, *_ in brief[2]} == {1e-4, 3e-4} and {(n, f) for _, n, f in brief[2]} == {(4000, 1)}
    )
    choice = progress.choice
    assert (choice.picked, choice.length, choice.added, choice.at_edge) == (1e-4, 2500, (), False)
    assert choice.score == pytest.approx(0.495)
    assert choice.settings == {"optim.lr": 1e-4, "optim.iterations": 3125, "optim.decay_at": (2500,)}
    summary = json.loads(json.dumps(choice.to_dict()))
    assert summary["runs"] == 10 and summary["iterations"] == 5 * 1000 + 3 * 3000 + 2 * 4000
    assert [len(summary["curves"][stage]) for stage in summary["curves"]] == [5, 3, 2]


def test_every_choosing_run_is_at_a_constant_rate_on_held_out_classes(tmp_path):
    for setting in (CARS, CUB):
        for arm in tuned_arms(setting):
            for config in Study(EXPERIMENT, setting, Records(tmp_path)).choosing(arm):
                check(config)
                assert config.data.holdout == 0.2 and config.optim.decay_at == () and config.seed == 0
                assert config.log.evaluate_every == 500


def test_rate_and_length_come_from_the_mean_of_both_folds(tmp_path):
    """3e-4 is best on fold A at 1,000, but what it gains there it loses on fold B."""

    def score(rate, iteration, fold):
        if rate == 3e-4:
            return (0.60, 0.30)[fold]
        if rate == 1e-4:
            return {500: 0.40, 1000: 0.50}.get(iteration, 0.45) if fold == 0 else (0.5 if iteration == 1500 else 0.4)
        return 0.1

    progress, _ = play(CARS, arm_of(CARS), Records(tmp_path), score)
    assert (progress.choice.picked, progress.choice.length) == (1e-4, 1500)
    assert progress.choice.score == pytest.approx((0.45 + 0.5) / 2)


def test_a_best_trial_at_the_edge_adds_a_rate_at_most_twice(tmp_path):
    progress, rounds = play(CARS, arm_of(CARS), Records(tmp_path), peak(1e-2, 4000))
    assert [[c.optim.lr for c in each] for each in rounds[1:3]] == [[3e-3], [1e-2]]
    assert {c.optim.iterations for each in rounds[1:3] for c in each} == {1000}
    assert progress.choice.added == (3e-3, 1e-2) and progress.choice.at_edge and progress.choice.to_dict()["longest"]
    once, _ = play(CARS, arm_of(CARS, memory=True), Records(tmp_path), peak(3e-6, 500))
    assert once.choice.added == (3e-6, 1e-6) and once.choice.picked == 3e-6 and not once.choice.at_edge


def test_a_choice_at_the_edge_gets_its_neighbour_tried_even_if_no_trial_said_so(tmp_path):
    def score(rate, iteration, fold):
        if rate == 1e-5:
            return 0.45 if iteration <= 1000 else 0.6  # slow, but better in the end
        return {3e-6: 0.2, 3e-5: 0.5}.get(rate, 0.3)

    progress, rounds = play(CARS, arm_of(CARS), Records(tmp_path), score)
    assert progress.choice.picked == 1e-5 and progress.choice.added == (3e-6,) and not progress.choice.at_edge
    assert [(c.optim.lr, c.optim.iterations) for c in rounds[-1]] == [(3e-6, 1000)]


def test_a_rate_that_diverges_is_the_worst(tmp_path):
    progress, _ = play(CARS, arm_of(CARS), Records(tmp_path), peak(3e-4, 2000), lambda config: config.optim.lr == 1e-3)
    assert progress.choice.picked == 3e-4 and 1e-3 not in progress.choice.full
    assert progress.choice.trials[1e-3] == {}


def test_equals_are_settled_by_the_smaller_rate_and_the_shorter_length(tmp_path):
    progress, _ = play(CARS, arm_of(CARS), Records(tmp_path), lambda rate, iteration, fold: 0.5 if 1e-5 < rate < 1e-3 else 0.1)
    assert (progress.choice.picked, progress.choice.length) == (3e-5, 500)


@pytest.mark.parametrize(("rate", "further"), [(1e-5, 3e-6), (3e-5, None), (1e-3, 3e-3)])
def test_the_next_rate(rate, further):
    assert next_rate(rate, BUDGET.rates) == further
    assert next_rate(3e-3, (*BUDGET.rates, 3e-3)) == 1e-2 and next_rate(3e-6, (3e-6, *BUDGET.rates)) == 1e-6


def test_curves_by_hand(tmp_path):
    records = Records(tmp_path)
    config = choosing_config(CARS, arm_of(CARS), 1e-4, 1000, 0, 500)
    write(records, config, {250: 0.9, 500: 0.2, 1000: 0.3})
    assert curve_of(records.find(identity(config)), 500) == {500: 0.2, 1000: 0.3}
    assert mean_curve({500: 0.2, 1000: 0.4}, {500: 0.4}) == pytest.approx({500: 0.3, 1000: 0.2})
    assert best_rates({1.0: {500: 0.1}, 2.0: {500: 0.3, 1000: 0.2}, 3.0: {}}, 2) == [2.0, 1.0]


def test_table_7_is_in_the_grid_and_the_letter_is_the_recipe_paper():
    for setting, rate, iterations, decay, alpha in ((CARS, 1e-4, 2000, (1400,), 0.1), (CUB, 3e-5, 1400, (), 0.2)):
        assert rate in BUDGET.rates
        for memory in (False, True):
            config = config_of(setting, arm_of(setting, memory=memory, kind=LETTER).settings)
            assert (config.optim.lr, config.optim.iterations, config.optim.decay_at) == (rate, iterations, decay)
            tuned = config_of(setting, arm_of(setting, memory=memory).settings)
            assert tuned.memory == config.memory and bool(config.memory.ratio) == memory
        assert (config.memory.update, config.memory.alpha, config.memory.momentum) == ("backprop", alpha, 0.9)
        assert config.memory.batch_weight == 0 and config.memory.start == 0 and config.memory.fill  # Algorithm 1


def test_all_arms_share_what_is_not_tuned():
    for setting in (CARS, CUB):
        configs = [config_of(setting, arm.settings) for arm in tuned_arms(setting)]
        assert len({(c.data, c.model, c.batch, c.optim.weight_decay, c.loss.reduction) for c in configs}) == 1
        assert configs[0].batch.size == 64 and configs[0].batch.sampler == "pk" and configs[0].model.dim == 512


def test_the_order_is_cars_before_cub_and_choices_before_tests(tmp_path):
    records = Records(tmp_path)
    now = plan([EXPERIMENT], [CARS, CUB], None, records)
    first = list(
        dict.fromkeys(
            (t.config.data.name, t.config.loss.name, bool(t.config.memory.ratio)) for t in now.ready if t.config.data.holdout
        )
    )
    losses = ("contrastive", "multi_similarity", "triplet")
    assert first == [(data, loss, memory) for data in ("cars", "cub") for loss in losses for memory in (False, True)]
    held_out = [bool(task.config.data.holdout) for task in now.ready]
    assert held_out == sorted(held_out, reverse=True) and sum(held_out) == 60
    assert now.waiting == 2 * 2 * (5 + 5 + 3) and len(now.ready) - 60 == now.waiting  # the tuned ones wait, the letters do not


def test_after_the_choice_the_test_classes_are_met_with_what_was_chosen(tmp_path):
    records = Records(tmp_path)
    arm = arm_of(CARS, "MS", True)
    play(CARS, arm, records, peak(3e-5, 1000))
    tasks = [task for task in plan([EXPERIMENT], [CARS], None, records).ready if task.chosen]
    assert [task.config.seed for task in tasks] == [0, 1, 2, 3, 4]
    assert all((t.config.optim.lr, t.config.optim.iterations, t.config.optim.decay_at) == (3e-5, 1250, (1000,)) for t in tasks)
    assert all(not t.config.data.holdout and not t.config.log.evaluate_every for t in tasks)
    assert tasks[0].chosen["length"] == 1000


# ------------------------------------------------------------------ in miniature, on the built-in glyphs


def miniature(records: Records, runs: Path, most: int = 100) -> list[Task]:
    """Makes the runs of the miniature in this process, `most` of them."""
    tasks: list[Task] = []
    while len(tasks) < most and (ready := plan([EXPERIMENT], [GLYPHS], 1, records).ready):
        execute(ready[0], ready[0].config, runs, records)
        tasks.append(ready[0])
    return tasks


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Records, Path, list[Task]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tuned")
    records = Records(folder / "results")
    tasks = miniature(records, folder / "runs", 5)  # stopped here, and continued
    records = Records(folder / "results")
    return records, folder / "runs", tasks + miniature(records, folder / "runs")


def test_the_miniature_runs_to_its_end_and_draws_itself(finished):
    records, _, tasks = finished
    (setting,) = [GLYPHS]
    now = plan([EXPERIMENT], [setting], 1, records)
    assert (now.ready, now.waiting) == ([], 0) and len({task.key for task in tasks}) == len(tasks) == len(records)
    study = Study(EXPERIMENT, setting, records)
    assert {study.choice(arm) is not None for arm in study.arms if arm.tune} == {True}
    choosing = [record for record in records if record.config["data.holdout"]]
    assert {record.config["data.fold"] for record in choosing} == {0, 1}
    for record in choosing:
        length = record.config["optim.iterations"]
        assert [step + 1 for step in record.curve("map@r")[0]] == list(range(2, length + 1, 2))
    scores, *sentences, _, choices, _ = EXPERIMENT.draw("glyphs", [study])
    assert [row[0] for row in scores.rows] == ["contrastive, tuned", "contrastive, Table 7"] and len(choices.rows) == 2
    assert len(sentences) >= 2 and all("one seed, so there is no interval" in each for each in sentences[:2])


def test_the_longer_run_goes_on_from_the_trial_exactly(finished, tmp_path, monkeypatch):
    records, runs, tasks = finished
    task = next(
        task for task in tasks if task.config.optim.iterations == 8 and not task.config.data.fold and task.config.memory.ratio
    )
    resumed = records.find(identity(task.config))
    assert resumed.values["wall_seconds"] is None  # of a run that did not begin here
    trial = override(task.config, {"optim.iterations": 4})
    assert folder_name(trial) == folder_name(task.config) and (runs / folder_name(trial) / "checkpoints" / "last.pt").exists()
    alone = Records(tmp_path / "results")
    execute(task, task.config, tmp_path / "runs", alone)
    whole = alone.find(identity(task.config))
    assert whole.values["wall_seconds"] is not None and whole.curve("memory_loss")[0]  # with the memory on
    assert whole.values["curves"] == resumed.values["curves"] and whole.values["scores"] == resumed.values["scores"]
    steps = []
    monkeypatch.setattr(loop, "learn", lambda *_: steps.append(1))
    execute(task, task.config, runs, alone)  # all of it is there: nothing is trained again
    assert not steps and alone.find(identity(task.config)).values["scores"] == whole.values["scores"]


def test_only_a_constant_rate_shares_its_folder(finished):
    _, _, tasks = finished
    task = tasks[0]
    for change in ({"optim.decay_at": (3,)}, {"log.evaluate_every": 0}, {"optim.lr": 0.5}, {"data.fold": 1}):
        assert folder_name(override(task.config, change)) != folder_name(task.config)


def test_hits_are_kept_per_query_and_their_mean_is_recall(finished):
    records, runs, tasks = finished
    tests = [task for task in tasks if not task.config.data.holdout]
    assert len(tests) == 4
    for task in tests:
        record = records.find(identity(task.config))
        right = unpacked(record.values["hits"])
        query = read_run(task.config, runs / folder_name(task.config)).protocols[0].query
        assert len(right) == len(query) and right.mean() == pytest.approx(record.score(), abs=1e-6)
        with np.load(runs / folder_name(task.config) / "examples.npz") as examples:
            nearest = examples["neighbours"][:, 0]
        assert [bool(query.labels[nearest[k]] == query.labels[k]) for k in range(len(query))] == right.tolist()
    assert {record.values["hits"] is None for record in records if record.config["data.holdout"]} == {True}
