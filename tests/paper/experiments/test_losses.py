import pytest

from paper.experiment import setting_of
from paper.experiments import EXPERIMENTS
from paper.experiments.losses import choices, columns_of, draw_comparison, draw_losses
from paper.page import Claim, Table
from paper.record import Records
from paper.study import Study
from tests.paper.made_up import CARS, carry_out


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


def test_a_gain_is_told_with_its_error(study):
    claims = [block for block in draw_losses("cars", [study]) if isinstance(block, Claim)]
    assert len(claims) == 3
    assert claims[0] == (
        "cars, efficientnet_lite0, contrastive: the memory adds +10.0 ± 0.0 points (the paper, with GoogLeNet: +7.8), 3 seeds; "
        "more than two standard errors from 0."
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


def test_ours_stands_below_other_work(study):
    table = draw_comparison("cars", [study])[0]
    assert table.rows[-1][:3] == ["**ours**, contrastive w/ M", "efficientnet_lite0, 512-d", "61.6 ± 0.6"]
    assert table.rows[-2][0] == "contrastive w/ M"


def test_columns_are_those_of_the_paper():
    assert [name for name, _, _ in columns_of("cars")] == ["R@1", "R@2", "R@4", "R@8", "R@16", "R@32"]
    assert columns_of("vehicleid")[2] == ("medium R@1", 1, "medium leave-one-out")


def test_small_nets_have_the_sum_beside_the_mean():
    labels = [arm.label for arm in EXPERIMENTS["s-table-3"].arms(setting_of("omniglot"))]
    assert "contrastive, summed w/ M" in labels and len(labels) == 8
