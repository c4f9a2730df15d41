from dataclasses import replace

import pytest

from paper import published
from paper.experiment import config_of, setting_of
from paper.experiments import EXPERIMENTS
from paper.experiments.updates import (
    alpha_arms,
    exception_arms,
    momentum_arms,
    official_arms,
    precision_arms,
    preset_arms,
    slopes,
    trick_arms,
)  # fmt: skip
from paper.page import Claim
from paper.record import Records, identity
from paper.study import Study, plan
from tests.paper.made_up import CARS, invented
from xbm_app.train.config import override
from xbm_app.train.presets import preset


def test_the_updates_are_those_of_the_supplementary():
    averages = [config_of(CARS, arm.settings).memory for arm in momentum_arms(CARS)]
    assert [(m.update, m.momentum) for m in averages[1:]] == [("moving_average", m) for m in (0, 0.01, 0.1, 0.5, 0.9)]
    backprops = [config_of(CARS, arm.settings).memory for arm in alpha_arms(CARS)]
    assert [(m.update, m.momentum, m.alpha) for m in backprops[1:]] == [("backprop", 0, a) for a in (0, 0.01, 0.1, 0.5, 0.9)]
    assert averages[0].update == backprops[0].update == "queue"


@pytest.mark.parametrize("name", ["s-table-1", "s-table-2"])
def test_a_column_a_value_and_the_papers_row(drawn, name):
    table = drawn(name)[0]
    assert len(table.header) == 7 and table.rows[0][0] == "paper (GoogLeNet)" and table.rows[0][2] == "78.8"
    assert table.rows[1] == ["efficientnet_lite0", *["60.6"] * 6]


def test_faster_updates_share_their_rate(tmp_path):
    study = Study(EXPERIMENTS["s-table-6"], CARS, Records(tmp_path))
    one, ten = ([identity(config) for config in study.choosing(arm)] for arm in study.arms)
    assert one == ten and config_of(CARS, study.arms[1].settings).memory.updates_per_step == 10


@pytest.mark.parametrize("data", ["sop", "inshop", "vehicleid", "cub", "cars", "deepfashion2"])
def test_the_presets_are_run_as_they_are(data):
    setting = setting_of(data)
    settings, wanted = (identity(config) for config in (config_of(setting, preset_arms(setting)[1].settings), preset(data)))
    assert {name: v for name, v in settings.items() if v != wanted[name]}.keys() <= {"log.every"}
    assert config_of(setting, preset_arms(setting)[0].settings).memory.ratio == 0


def test_presets_stand_beside_the_papers_values(drawn):
    table = drawn("s-table-7")[0]
    assert table.rows[0] == ["paper", "0.0001", "1400", "2000", "–", "0.1", "0.9"]
    assert table.rows[1] == ["`xbm train cars --recipe paper`", "0.0001", "1400", "2000", "1", "0.1", "0.9"]


def test_the_tricks_are_rows_of_their_own(drawn):
    configs = {arm.label: config_of(CARS, arm.settings).model for arm in trick_arms(CARS)}
    assert configs["contrastive, frozen batch norm"].freeze_batch_norm and not configs["contrastive"].freeze_batch_norm
    assert configs["contrastive w/ M, trunk at a tenth of the lr"].trunk_lr == 0.1
    assert len(drawn("tricks")[0].rows) == 6


def test_every_exception_of_the_recipe_differs_from_it_in_what_its_label_says():
    usual, warm, ascending = (config_of(CARS, arm.settings) for arm in exception_arms(CARS))
    assert identity(usual) == {**identity(preset("cars", trunk=CARS.trunk)), "log.every": 50}
    assert override(usual, {"memory.start": 1000}) == warm and override(usual, {"memory.alpha": -0.1}) == ascending
    for arm, exact in zip(precision_arms(CARS)[::2], precision_arms(CARS)[1::2]):
        config = config_of(CARS, arm.settings)
        assert exact.label == f"{arm.label}, fp32" and config.optim.precision == config.memory.dtype == "auto"
        assert config_of(CARS, exact.settings) == override(config, {"optim.precision": "fp32", "memory.dtype": "float32"})


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ((0.001, 0.002, 0.0), ": equivalent within ±1 point"),
        ((0.03, 0.031, 0.032), ": different"),
        ((0.02, -0.02, 0.01), ": neither a difference nor equivalence within ±1 point is shown"),
        ((0.01,), ""),
    ],
)
def test_nothing_has_changed_only_if_a_test_of_equivalence_says_so(tmp_path, differences, words):
    records, experiment = Records(tmp_path), EXPERIMENTS["fp32"]

    def score(config):
        return 0.6 + (differences[config.seed] if config.optim.precision == "fp32" else 0.0)

    for task in plan([experiment], [CARS], len(differences), records).ready:
        records.write(invented(task, score))
    _, *claims = experiment.draw("cars", [Study(experiment, CARS, records)])
    assert len(claims) == 3 and all(claim.endswith(f"{words}.") for claim in claims)
    assert claims[1].startswith("cars, efficientnet_lite0, contrastive w/ M, Table 7, fp32: ")


def test_the_released_code_is_run_as_its_preset_says(tmp_path):
    without, with_memory = (config_of(CARS, arm.settings) for arm in official_arms(CARS))
    assert identity(with_memory) == {**identity(preset("cars", trunk=CARS.trunk, recipe="official")), "log.every": 50}
    assert without == override(with_memory, {"memory.ratio": 0.0})
    records, experiment = Records(tmp_path), EXPERIMENTS["official"]
    for task in plan([experiment], [CARS], 1, records).ready:
        values = invented(task)
        records.write({**values, "scores": {"held-out": {"recall@1": 0.9}, **values["scores"]}})
    table, _, claim = experiment.draw("cars", [Study(experiment, CARS, records)])
    assert [row[1:3] for row in table.rows] == [["90.0", "50.6"], ["90.0", "60.6"]]  # chosen on the one, scored on the other
    assert claim.startswith("cars, efficientnet_lite0: as in the released code, the memory adds +10.0 points")


def test_a_trend_is_tested_once_over_both_data_sets(tmp_path):
    """R@1 rises by 2 points per value on Cars and by 1 on CUB, exactly: slopes 2, 2, 1, 1."""
    experiment, records = EXPERIMENTS["s-table-1"], Records(tmp_path)
    settings = [CARS, replace(CARS, data="cub")]

    def score(config):
        step = 0.02 if config.data.name == "cars" else 0.01
        return 0.4 + step * published.MOMENTA.index(config.memory.momentum or 0.0) + 0.001 * config.seed

    while ready := plan([experiment], settings, 2, records).ready:
        for task in ready:
            records.write(invented(task, score))
    studies = [Study(experiment, setting, records) for setting in settings]
    assert [round(value, 6) for study in studies for value in slopes(study).values()] == [0.02, 0.02, 0.01, 0.01]
    texts = [[b for b in experiment.draw(s.setting.data, [s]) if isinstance(b, Claim)] for s in studies]
    assert texts[1] == [] and texts[0][0].startswith("efficientnet_lite0: R@1 rises with m: +1.5 points per value (95 % ")
    assert texts[0][0].endswith("over the seeds on cars and cub.")
