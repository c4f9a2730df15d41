import pytest

from paper.experiment import config_of, setting_of
from paper.experiments import EXPERIMENTS
from paper.experiments.updates import alpha_arms, momentum_arms, preset_arms, trick_arms
from paper.record import Records, identity
from paper.study import Study
from tests.paper.made_up import CARS
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
