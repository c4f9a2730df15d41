import json

import pytest
import torch

from paper.experiment import base, config_of, contrastive, setting_of, sized
from paper.experiments import EXPERIMENTS, sizes
from paper.experiments.sizes import (
    RATIOS,
    SIZES,
    TABLE_2,
    TIMED,
    Steps,
    _against,
    draw_batch_size,
    draw_cost,
    draw_figure_1,
    in_turns,
    measure_cost,
    measure_step_times,
)
from paper.page import Claim, Figure, Table
from paper.record import Records, identity
from paper.statistics import Gain
from paper.study import Study
from tests.paper.made_up import CARS, carry_out
from tests.tiny import tiny_config
from xbm_app.train.config import override


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
    assert [line["label"] for line in ratios["lines"]] == ["equal iterations", "equal passes"]


def test_one_seed_is_no_test(tmp_path):
    claims = [block for block in drawn("batch-size", tmp_path) if isinstance(block, Claim)]
    assert claims[0].endswith(
        "batch size 16 with memory scores higher than batch size 256 without: 60.2 against 52.6, +7.6 points (one seed, so "
        "there is no interval); 4 passes over the images against 64; the paper, SOP: 78.2 against 71.7."
    )
    single = "+2.4 points (one seed, so there is no interval)"
    assert f"{single} without memory (the paper, SOP: +25.1) and {single} with memory (the paper, SOP: +3.2)" in claims[1]
    assert (
        "equal passes: batch size 16 with memory scores higher than" in claims[2] and "the paper" not in claims[2] + claims[3]
    )


def test_batches_of_other_sizes_are_compared_by_welchs_test(tmp_path):
    claims = [block for block in drawn("batch-size", tmp_path, seeds=3) if isinstance(block, Claim)]
    # 60.16, 61.16, 62.16 and 52.56, 53.56, 54.56: 7.6 points, each mean's error 0.577, and 4 degrees of freedom
    assert "batch size 16 with memory beats batch size 256 without: 61.2 ± 0.6 against 53.6 ± 0.6, +7.6 points " in claims[0]
    assert "(95 % interval +5.3 to +9.9, p < 0.001, Welch, 3 seeds)" in claims[0]
    assert "+2.4 points (95 % interval +0.1 to +4.7, p = 0.042, Welch, 3 seeds) without memory" in claims[1]


@pytest.mark.parametrize(("lead", "words"), [(0.05, "beats"), (0.01, "is not clearly ahead of"), (-0.05, "is behind")])
def test_a_lead_in_words(lead, words):
    assert _against(Gain(lead, 0.01, 4, 3, paired=False)) == words


def test_with_equal_passes_every_size_sees_as_many_images(tmp_path):
    study = Study(EXPERIMENTS["batch-size"], CARS, Records(tmp_path))
    for size in (16, 64, 256):
        config = config_of(CARS, sized(CARS, "contrastive", size, 1.0, passes=True).settings)
        assert (config.batch.size * config.optim.iterations, config.batch.size * config.optim.decay_at[0]) == (128_000, 89_600)
    other, usual = (sized(CARS, "contrastive", size, 1.0, passes=size != 64) for size in (16, 64))
    assert [identity(config) for config in study.choosing(other)] == [identity(config) for config in study.choosing(usual)]


def test_pk_and_random_shuffle_stand_beside_each_other(tmp_path):
    (table,) = [block for block in drawn("batch-size", tmp_path, seeds=2) if isinstance(block, Table)]
    assert len(table.rows) == 6 and table.rows[1][0] == "efficientnet_lite0, R_M = 1, PK" and table.rows[1][-1] == "1–2"


def test_the_sizes_of_the_papers_sentences_have_three_seeds(tmp_path):
    single = {(size, ratio) for size in SIZES for ratio in RATIOS if sized(CARS, "contrastive", size, ratio).seeds == 1}
    assert {size for size, _ in single if (size, 1.0) in single} == {32, 128}
    assert not single & {(size, ratio) for size in (16, 64, 256) for ratio in (0.0, 0.01, 1.0)} and (16, 0.5) in single


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


def test_time_and_memory_beside_the_papers(tmp_path):
    records = Records(tmp_path)
    carry_out([EXPERIMENTS["table-2"]], [CARS], 1, records)
    table, note = draw_cost("cars", [Study(EXPERIMENTS["table-2"], CARS, records)])
    rows = {row[0]: row[1:] for row in table.rows[:5]}
    assert rows["batch 64, R_M = 1"] == ["–", "3.19 h", "+0.2 GB", "77.4"]
    ours = table.rows[6:]
    assert [row[0] for row in ours] == list(TABLE_2)
    # 20 ms an iteration, 2,000 of them; the baseline's 3 GB in all, the others' beyond it
    assert ours[0] == ["batch 64", "20.0 ms", "0.7 min", "3.00 GB", "50.6"] and ours[3][3:] == ["+0.00 GB", "60.6"]
    assert "NVIDIA H200" in note


def test_timed_runs_have_the_machine_for_themselves(tmp_path):
    study = Study(EXPERIMENTS["table-2"], CARS, Records(tmp_path))
    timed = [arm for arm in study.arms if arm.label.endswith("timed")]
    assert len(timed) == len(TABLE_2) and all(arm.measures == ("cost",) and arm.choose is None for arm in timed)


def test_nothing_run_nothing_drawn():
    assert draw_cost("sop", []) == []


def test_cost_is_the_difference_of_a_long_run_and_a_short_one(tmp_path, monkeypatch):
    """5 s to warm up and 0.02 s an iteration: the warm-up cancels."""

    def train(config, folder, quiet):
        n = config.optim.iterations
        return {"seconds_per_iteration": (5 + 0.02 * n) / n, "peak_memory_bytes": 7}

    monkeypatch.setattr("xbm_app.train.loop.train", train)
    config = override(base(setting_of("cars")), TIMED)
    (tmp_path / "result.json").write_text(json.dumps(train(config, None, True)))
    assert measure_cost(config, tmp_path) == {"seconds_per_iteration": pytest.approx(0.02), "peak_memory_bytes": 7}


# ------------------------------------------------------------------ steps timed in alternation


def test_everybody_warms_up_and_then_the_order_turns(photos, tmp_path, monkeypatch):
    turns = []

    class Watched(Steps):
        def seconds(self, count):
            turns.append((self.run.config.memory.update, self.done, count))
            super().seconds(count)
            return float(len(turns))

    monkeypatch.setattr(sizes, "Steps", Watched)
    monkeypatch.setattr(sizes, "TURNS", 3)
    configs = {name: tiny_config(photos, optim__iterations=8, memory__update=name) for name in ("queue", "moving_average")}
    times = in_turns(configs, tmp_path)
    assert turns == [
        ("queue", 0, 2), ("moving_average", 0, 2), ("queue", 2, 2), ("moving_average", 2, 2), ("moving_average", 4, 2),
        ("queue", 4, 2), ("queue", 6, 2), ("moving_average", 6, 2),
    ]  # fmt: skip
    assert times == {"queue": [3.0, 6.0, 7.0], "moving_average": [4.0, 5.0, 8.0]}


def test_steps_train_and_their_memory_is_on_from_the_first(photos, tmp_path):
    config = tiny_config(photos, optim__iterations=4, memory__start=3, memory__fill=False)
    steps = Steps(config, tmp_path)
    before = [p.detach().clone() for p in steps.run.model.parameters()]
    assert steps.seconds(1) > 0 and steps.done == 1 and len(steps.run.memory) == config.batch.size
    assert any(not torch.equal(one, other) for one, other in zip(before, steps.run.model.parameters()))
    assert Steps(tiny_config(photos, memory__ratio=0.0), tmp_path).seconds(2) > 0


def test_looking_at_labels_is_part_of_what_a_step_takes(photos, tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr("paper.experiments.sizes.ignore_label_errors", lambda memory, classes: looks.append(classes))
    Steps(tiny_config(photos, memory__update="moving_average", memory__doubt="skip"), tmp_path).seconds(10)
    assert looks == [6]


def test_the_plain_queue_is_the_released_codes_and_otherwise_the_same(tmp_path, monkeypatch):
    timed = {}
    monkeypatch.setattr(sizes, "in_turns", lambda configs, folder: timed.update(configs) or {"queue": [0.0123456]})
    changes = {"memory.update": "moving_average", "memory.reduction": "balanced", "memory.batch_weight": 0.5}
    config = override(base(setting_of("cars")), changes)
    assert measure_step_times(config, tmp_path) == {"queue": [0.01235]} and timed["ours"] == config
    plain = timed["queue"].memory
    assert (plain.update, plain.ratio, plain.reduction, plain.batch_weight) == ("queue", 1.0, None, 1.0)
    assert timed["queue"].loss.reduction == "sum" and timed["queue"].optim == config.optim
