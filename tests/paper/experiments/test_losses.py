import pytest

from paper.experiment import setting_of
from paper.experiments import EXPERIMENTS
from paper.experiments.losses import better_without, choices, columns_of, draw_comparison, draw_losses
from paper.page import Claim, Table
from paper.record import Records, identity
from paper.study import Study, Task, plan
from tests.paper.made_up import CARS, carry_out, invented
from xbm_app.train.config import override
from xbm_app.train.presets import preset


@pytest.fixture
def study(tmp_path):
    records = Records(tmp_path)
    carry_out([EXPERIMENTS["s-table-3"]], [CARS], 3, records)
    return Study(EXPERIMENTS["s-table-3"], CARS, records)


def test_the_six_rows_with_the_papers_beside_them(study):
    table = draw_losses("cars", [study])[0]
    assert table.header == ["R@1, %", "paper (GoogLeNet, 512-d)", "gain", "efficientnet_lite0", "gain from memory"]
    assert [row[0] for row in table.rows] == ["contrastive", "contrastive w/ M", "triplet", "triplet w/ M", "MS", "MS w/ M"]
    # seeds 0, 1, 2: 50.64, 51.64, 52.64, and ten points more with memory, exactly
    assert table.rows[0] == ["contrastive", "72.5", "–", "51.6 ± 0.6", "–"]
    assert table.rows[1] == ["contrastive w/ M", "80.3", "+7.8", "61.6 ± 0.6", "+10.0 ± 0.0"]


def test_a_gain_is_told_with_its_interval(study):
    claims = [block for block in draw_losses("cars", [study]) if isinstance(block, Claim)]
    assert len(claims) == 3
    assert claims[0] == (
        "cars, efficientnet_lite0, contrastive: the memory adds +10.0 points (95 % interval +10.0 to +10.0, p < 0.001, 3 seeds)"
        "; the paper, with GoogLeNet: +7.8."
    )


def test_more_than_two_standard_errors_of_three_seeds_are_not_called_clear(tmp_path):
    records = Records(tmp_path)
    gains = {0: 0.01, 1: 0.02, 2: 0.03}  # 3.5 standard errors from 0

    def score(config):
        return 0.5 + (gains[config.seed] if config.memory.ratio else 0.0)

    while ready := plan([EXPERIMENTS["s-table-3"]], [CARS], 3, records).ready:
        for task in ready:
            records.write(invented(task, score))
    claim = next(b for b in draw_losses("cars", [Study(EXPERIMENTS["s-table-3"], CARS, records)]) if isinstance(b, Claim))
    assert claim.endswith(
        "+2.0 points (95 % interval −0.5 to +4.5, p = 0.074, 3 seeds); the paper, with GoogLeNet: +7.8. The interval includes "
        "0."
    )


def test_an_over_trained_baseline_is_called_one(study):
    records, arm = study.records, study.arms[0]
    config = study.config(arm, 0)
    for change, r_at_1 in (
        ({"data.noise": 0.1}, 0.7),
        ({"optim.iterations": 500, "optim.decay_at": (350,), "batch.size": 256}, 0.6),
        ({"optim.iterations": 400}, 0.2),  # shorter and worse
        ({"optim.lr": 0.5}, 0.9),  # a better rate is no less training
        ({"optim.iterations": 9000}, 0.9),
    ):
        records.write(invented(Task(override(config, change)), lambda _, value=r_at_1: value))
    assert {how: scores.mean for how, scores in better_without(study, arm).items()} == {
        "with 10 % wrong labels": 0.7,
        "after 500 iterations with batches of 256": 0.6,
    }
    claims = [block for block in draw_losses("cars", [study]) if isinstance(block, Claim)]
    assert len(claims) == 4 and claims[1] == (
        "cars, efficientnet_lite0, contrastive: the baseline is over-trained. Without memory, R@1 is 51.6; it is 70.0 with 10 "
        "% wrong labels (one seed) and 60.0 after 500 iterations with batches of 256 (one seed). The gain above includes what "
        "a better schedule would give without a memory."
    )


def test_the_chosen_rates_are_shown_with_what_they_were_chosen_by(study):
    note, table = choices(study)
    assert "held out" in note and table.header[1:4] == ["lr 3e-05", "lr 0.0001", "lr 0.0003"]
    assert table.rows[0] == ["contrastive", "49.9", "**50.6**", "48.6", ""] and len(table.rows) == 6


def test_without_runs_the_papers_rows_stay():
    table = draw_losses("cub", [])[0]
    assert table.rows[1] == ["contrastive w/ M", "61.9", "+4.4"]
    compared = draw_comparison("sop", [])
    assert isinstance(compared[0], Table) and len(compared[0].rows) == 16 and "77.4" in compared[1]


def test_ours_and_the_letter_stand_below_other_work(study):
    table = draw_comparison("cars", [Study(EXPERIMENTS["s-table-4"], CARS, study.records)])[0]
    assert table.rows[-2][:3] == ["**ours**, contrastive w/ M", "efficientnet_lite0, 512-d", "61.6 ± 0.6"]
    assert table.rows[-1][:3] == ["**the letter** (Table 7), contrastive w/ M", "efficientnet_lite0, 512-d", "–"]
    assert table.rows[-3][0] == "contrastive w/ M"


@pytest.mark.parametrize("trunk", ["googlenet", "resnet50"])
@pytest.mark.parametrize("name", ["table-1", "table-2", "table-3", "table-4", "table-5"])
def test_every_table_of_the_paper_has_an_arm_to_its_letter_and_a_grid_with_its_rate(tmp_path, name, trunk):
    for data in EXPERIMENTS[name].data:
        study = Study(EXPERIMENTS[name], setting_of(data, trunk), Records(tmp_path))
        exact = identity(override(preset(data, trunk=trunk), {"log.every": 50}))
        letter = [identity(config) for arm in study.arms if arm.choose is None and (config := study.config(arm, 0))]
        assert exact in letter, data  # Algorithm 1: the memory's loss alone, with Table 7
        for arm in study.arms:
            if arm.choose is not None:
                assert preset(data).optim.lr in [config.optim.lr for config in study.choosing(arm)], arm.label


def test_methods_are_ranked_and_compared_with_ours_by_their_intervals(tmp_path):
    """MS and every proxy 5 points above contrastive with memory, the others 5 below."""
    experiment, records = EXPERIMENTS["methods"], Records(tmp_path)

    def score(config):
        above = config.loss.name.startswith(("pml", "multi"))
        ours = config.memory.update == "backprop" and config.memory.ratio
        return 0.6 + (0.0 if ours else 0.05 if above else -0.05) + 0.001 * config.seed

    while ready := plan([experiment], [CARS], None, records).ready:
        for task in ready:
            records.write(invented(task, score))
    table, claim = experiment.draw("cars", [Study(experiment, CARS, records)])
    assert [row[0] for row in table.rows][5] == "contrastive w/ M" and len(table.rows) == 10
    assert claim == (
        "cars, efficientnet_lite0: by its mean, contrastive with the paper's memory is number 6 of 10 methods tuned with the "
        "same budget. By 95 % intervals, it is ahead of contrastive, margin, contrastive, queue and contrastive, queue, "
        "momentum encoder, behind MS, Proxy-Anchor, NormSoftmax, SoftTriple and ProxyNCA, and not clearly different from none."
    )


def test_columns_are_those_of_the_paper():
    assert [name for name, _, _ in columns_of("cars")] == ["R@1", "R@2", "R@4", "R@8", "R@16", "R@32"]
    assert columns_of("vehicleid")[2] == ("medium R@1", 1, "medium leave-one-out")


def test_small_nets_have_the_sum_beside_the_mean():
    labels = [arm.label for arm in EXPERIMENTS["s-table-3"].arms(setting_of("omniglot"))]
    assert "contrastive, summed w/ M" in labels and len(labels) == 8
