from pathlib import Path

import pytest

import paper
from paper import experiments
from paper.experiment import Setting, setting_of
from paper.experiments import ALL, BEYOND, EXPERIMENTS, MEASURES, TIMINGS, experiment
from paper.page import Figure, Pictures, Table
from paper.record import Records
from paper.study import Study
from tests.paper.made_up import CARS, carry_out
from xbm.errors import InputError
from xbm_app.train.config import check

NAMES = sorted(ALL)
EVERYWHERE = [setting_of(data) for data in ("sop", "inshop", "vehicleid", "cub", "cars", "deepfashion2", "omniglot", "glyphs")]


def test_every_table_and_figure_of_the_paper_is_there():
    wanted = {
        "table-1", "table-2", "table-3", "table-4", "table-5", "s-table-1", "s-table-2", "s-table-3",
        "s-table-3-tuned", "s-table-4", "s-table-5", "s-table-6", "s-table-7", "figure-1", "batch-size", "drift",
        "valid-negatives", "lemma-1", "tricks", "ms-outliers", "mined", "retrieved", "fp32", "exceptions", "official",
        "methods",
    }  # fmt: skip
    assert set(EXPERIMENTS) == wanted and not wanted & set(BEYOND)


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_is_a_run_that_can_start(name, tmp_path):
    for setting in EVERYWHERE:
        study = Study(ALL[name], setting, Records(tmp_path))
        labels = [arm.label for arm in study.arms]
        assert labels and len(set(labels)) == len(labels)
        for arm in study.arms:
            assert set(arm.measures) <= {*MEASURES, *TIMINGS}
            configs = study.choosing(arm) or [study.config(arm, 1)]
            for config in configs:
                check(config)
                assert bool(config.data.holdout) == (
                    arm.choose is not None or name in ("robustness-choice", "robustness-cause", "official")
                )


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_draws_itself_from_results_of_two_trunks(name, tmp_path):
    records = Records(tmp_path)
    other = Setting("cars", "resnet50_v1", "w.safetensors")
    each = ALL[name]
    settings = [setting for setting in (CARS, other) if each.suits(setting)] or [setting_of(each.data[0])]
    count = carry_out([each], settings, 2, records)
    data = settings[0].data
    blocks = each.draw(data, [Study(each, setting, records) for setting in settings])
    assert count and blocks
    for block in blocks:
        if isinstance(block, Table):
            assert all(len(row) == len(block.header) for row in block.rows), block
            assert "nan" not in block.markdown()
        elif isinstance(block, Figure):
            assert block.data["panels"] and all(panel["lines"] for panel in block.data["panels"])
        elif isinstance(block, Pictures):
            assert block.rows[0] and block.rows[-1]
        else:
            assert "nan" not in block


def test_all_experiments_on_cars_share_their_runs(tmp_path):
    """Fewer runs than the experiments have by themselves."""
    tuned = ("s-table-3-tuned", "methods")  # lengths of their own
    whole = [each for each in EXPERIMENTS.values() if each.suits(CARS) and each.name not in tuned]
    alone = sum(carry_out([each], [CARS], 1, Records(tmp_path / each.name)) for each in whole)
    together = carry_out(whole, [CARS], 1, Records(tmp_path / "all"))
    assert together < 0.6 * alone


def test_a_name_that_does_not_exist_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 's-table-3'"):
        experiment("s-table3")


def test_the_readme_says_where_every_experiment_is():
    readme = (Path(paper.__file__).parent / "README.md").read_text()
    rows = [line for line in readme.splitlines() if "`experiments/" in line]
    for name, each in ALL.items():
        (row,) = [row for row in rows if f"`{name}`" in row]
        family = next(module for module in vars(experiments).values() if each in getattr(module, "EXPERIMENTS", ()))
        assert each.source in row and f"`experiments/{Path(family.__file__).name}`" in row
