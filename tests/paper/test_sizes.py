from paper.arms import contrastive, sized
from paper.blocks import Claim, Figure, Table
from paper.experiment import config_of
from paper.record import Records, identity
from paper.registry import EXPERIMENTS
from paper.sizes import RATIOS, draw_batch_size, draw_figure_1
from paper.study import Study
from tests.paper.made_up import CARS, carry_out


def drawn(name, tmp_path, seeds=1):
    records = Records(tmp_path)
    carry_out([EXPERIMENTS[name]], [CARS], seeds, records)
    draw = {"figure-1": draw_figure_1, "batch-size": draw_batch_size}[name]
    return draw("cars", [Study(EXPERIMENTS[name], CARS, records)])


def test_memory_ratio_has_its_points_at_batch_16(tmp_path):
    assert {0.0, 0.01} <= set(RATIOS) and len(RATIOS) >= 6
    blocks = drawn("figure-1", tmp_path)
    (figure,) = [block for block in blocks if isinstance(block, Figure)]
    sizes, ratios = figure.data["panels"]
    assert [line["label"] for line in sizes["lines"]] == ["contrastive", "triplet", "MS"]
    assert sizes["lines"][0]["x"] == [16, 32, 64, 128, 256] and sizes["lines"][0]["y"][-1] == 52.56
    assert ratios["lines"][0]["x"] == list(RATIOS) and ratios["lines"][0]["y"][:2] == [50.16, 60.16]


def test_the_claims_are_answered_by_the_figures(tmp_path):
    said = [block for block in drawn("batch-size", tmp_path) if isinstance(block, Claim)]
    assert "batch size 16 with memory beats batch size 256 without: 60.2 against 52.6" in said[0]
    assert "+2.4 points without memory (the paper, SOP: +25.1) and +2.4 points with memory (the paper, SOP: +3.2)" in said[1]
    assert "equal passes: batch size 16 with memory beats" in said[2] and "the paper" not in said[2] + said[3]


def test_with_equal_passes_every_size_sees_as_many_images(tmp_path):
    study = Study(EXPERIMENTS["batch-size"], CARS, Records(tmp_path))
    for size in (16, 64, 256):
        config = config_of(CARS, sized(CARS, "contrastive", size, 1.0, passes=True).settings)
        assert (config.batch.size * config.optim.iterations, config.batch.size * config.optim.decay_at[0]) == (128_000, 89_600)
    other, usual = (sized(CARS, "contrastive", size, 1.0, passes=size != 64) for size in (16, 64))
    assert [identity(config) for config in study.choosing(other)] == [identity(config) for config in study.choosing(usual)]


def test_pk_and_random_shuffle_stand_beside_each_other(tmp_path):
    (table,) = [block for block in drawn("batch-size", tmp_path, seeds=2) if isinstance(block, Table)]
    assert len(table.rows) == 6 and table.rows[1][0] == "efficientnet_lite0, R_M = 1, PK" and table.rows[1][-1] == "2"


def test_usual_sizes_are_the_usual_runs(tmp_path):
    """Batch 64 without memory is the row of S-Table 3: run once."""
    study = Study(EXPERIMENTS["s-table-3"], CARS, Records(tmp_path))
    one, other = study.choosing(sized(CARS, "contrastive", 64, 0.0)), study.choosing(contrastive(CARS)[0])
    assert [identity(config) for config in one] == [identity(config) for config in other]


def test_learning_rates_are_those_chosen_at_batch_64(tmp_path):
    study = Study(EXPERIMENTS["figure-1"], CARS, Records(tmp_path))
    for arm in study.arms:
        for config in study.choosing(arm):
            assert (config.batch.size, config.batch.sampler, config.memory.ratio in (0, 1)) == (64, "pk", True)
