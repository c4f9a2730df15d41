"""S-Table 3: which tests a gain gets, what is said of it, and that a seed pairs two arms."""

import base64
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from paper.experiment import GLYPHS, config_of
from paper.experiments.s_table_3 import FAMILY, NOT_YET, Comparison, adjusted_p, compare, draw_tuned
from paper.experiments.tuning import LETTER, ORDER, TUNED, tuned_arms
from paper.page import Claim, Table
from paper.record import Records, write_labels
from paper.statistics import holm, paired_gain
from paper.study import Spread, Study, plan
from tests.paper.experiments.test_tuning import CARS, CUB, EXPERIMENT, POINTS
from tests.paper.made_up import invented
from xbm_app.data.images import Dataset, ImageSet, Protocol
from xbm_app.train.config import override
from xbm_app.train.dataset import begin_run
from xbm_app.train.state import RunState

QUERIES = np.repeat(np.arange(10), 12)  # 120 test images of 10 classes
# R@1 without memory and what the memory adds, by loss; by seed ± half a point
SCORES = {"contrastive": (0.50, 0.10), "multi_similarity": (0.70, 0.0), "triplet": (0.60, -0.40)}


def score(config):
    base, added = SCORES[config.loss.name]
    wobble = 0.005 * ((config.seed % 2) - (config.seed % 3)) * (1 if config.memory.ratio else -1)
    return round(base + (added if config.memory.ratio else 0.0) + wobble + 0.05 * (config.optim.iterations == 2000), 6)


def packed(share):
    """The hits of a run: this share of every class, as far as it goes evenly."""
    right = np.arange(len(QUERIES)) % 12 < round(12 * share)
    return {"protocol": "test", "queries": len(right), "rank_1": base64.b64encode(np.packbits(right).tobytes()).decode()}


def carry_out(records, settings, skip=lambda task: False):
    """Every choice takes 1e-4 and 1,500 iterations; every test run has the score above."""
    while True:
        ready = [task for task in plan([EXPERIMENT], settings, None, records).ready if not skip(task)]
        if not ready:
            return
        for task in ready:
            config = task.config
            values = invented(task, score)
            if config.data.holdout:
                points = [t for t in POINTS if t <= config.optim.iterations]
                map_at_r = [0.4 - abs(math.log10(config.optim.lr / 1e-4)) / 10 - abs(t - 1500) / 1e5 for t in points]
                values["curves"] = {"step": [t - 1 for t in points], "map@r": map_at_r}
            else:
                values["hits"] = packed(score(config))
            records.write(values)


@pytest.fixture(scope="module")
def cars(tmp_path_factory):
    """All runs on Cars except seed 4 of multi-similarity with memory, tuned; none on CUB."""
    records = Records(tmp_path_factory.mktemp("results"))
    last = ("multi_similarity", 4, True)
    carry_out(
        records,
        [CARS],
        lambda t: bool(t.chosen) and (t.config.loss.name, t.config.seed, bool(t.config.memory.ratio)) == last,
    )
    images = ImageSet("cars test", QUERIES, list("abcdefghij"), pixels=np.zeros((len(QUERIES), 4, 4), np.uint8))
    write_labels(records.folder, Dataset("cars", images, (Protocol("test", images, (1,)),)))
    return Study(EXPERIMENT, CARS, records)


def test_a_gain_is_paired_over_the_seeds_that_both_arms_have(cars):
    found = compare(cars, "MS", TUNED)
    assert (len(found.one), len(found.other), found.gain.seeds, found.gain.paired) == (5, 4, 4, True)
    assert compare(cars, "triplet", TUNED).gain.seeds == 3
    whole = compare(cars, "contrastive", LETTER)
    assert whole.gain.mean == pytest.approx(np.mean([whole.other.by_seed[s] - whole.one.by_seed[s] for s in range(5)]))


def test_holm_is_over_the_six_declared_gains_and_those_not_run_count_as_1(cars):
    assert len(FAMILY) == 6 and {data for data, _ in FAMILY} == {"cars", "cub"}
    plain = {("cars", loss): compare(cars, loss, TUNED).gain.p for loss in ORDER}
    six = holm({**plain, **{("cub", loss): 1.0 for loss in ORDER}})
    assert adjusted_p(cars) == pytest.approx({which: six[which] for which in plain})
    smallest = min(plain, key=plain.get)
    assert adjusted_p(cars)[smallest] == pytest.approx(6 * plain[smallest])
    assert compare(cars, "contrastive", LETTER).adjusted is None  # exploratory
    assert adjusted_p(replace(cars, setting=replace(CARS, trunk="resnet50_v1"))) == {}


def test_the_bootstrap_needs_labels_and_hits(cars, tmp_path):
    low, high = compare(cars, "contrastive", TUNED).redrawn
    assert low == pytest.approx(high)  # every class gains the same here
    without = Records(tmp_path)
    carry_out(without, [CARS])
    assert compare(Study(EXPERIMENT, CARS, without), "contrastive", TUNED).redrawn is None


def test_the_six_rows_have_everything_beside_them(cars):
    table = draw_tuned("cars", [cars])[0]
    rows = {row[0]: dict(zip(table.header, row)) for row in table.rows}
    assert list(rows) == [f"{loss}, {kind}" for kind in (TUNED, LETTER) for loss in ORDER]
    row = rows["MS, tuned"]
    assert row["seeds"] == "4 of 5 and 4" and row["paper, gain"] == "+0.8" and row["paper, memory"] == "76.5"
    row = rows["contrastive, tuned"]
    one = compare(cars, "contrastive", TUNED).one
    assert row["no memory, mean ± sd"] == f"50.2 ± {100 * np.std(list(one.by_seed.values()), ddof=1):.1f}"
    assert row["rate and length, memory"] == "0.0001, 1,500" and row["p, Holm"] != "–"
    assert rows["contrastive, Table 7"]["rate and length, no memory"] == "0.0001, 2,000"
    assert rows["contrastive, Table 7"]["p, Holm"] == "–"


def test_sentences_follow_from_the_tests(cars):
    blocks = draw_tuned("cars", [cars])
    claims = [block for block in blocks if isinstance(block, Claim)]
    start = "cars, googlenet_bvlc, "
    said = {claim.removeprefix(start).partition(":")[0]: claim for claim in claims}
    assert "R@1 rises with the memory, from 50.2 to 59.8" in said["contrastive, tuned against tuned"]
    assert "R@1 collapses with the memory" in said["triplet, tuned against tuned"]
    assert "R@1 does not clearly change with the memory" in said["MS, tuned against tuned"]
    assert "The paper's +7.8 lies outside the interval" in said["contrastive, letter against letter"]
    # 2,000 iterations score five points more than the 1,875 of the choice
    assert "the choice failed this row. Tuned, R@1 is 60." in said["triplet without memory"]
    assert "chose rate 0.0001 and 1,500 iterations" in said["triplet without memory"]
    assert "3 of the 6 gains that were declared for Holm's correction are in, the others count as p = 1." in blocks


def test_holms_p_value_decides_where_it_is_declared():
    one, other = Spread({0: 0.5, 1: 0.5, 2: 0.5}), Spread({0: 0.54, 1: 0.55, 2: 0.56})
    gain = paired_gain(one.by_seed, other.by_seed)
    assert gain.sign == 1 and gain.p == pytest.approx(0.013, abs=5e-4)
    assert Comparison("MS", TUNED, one, other, adjusted=0.079).verdict == 0
    assert Comparison("MS", TUNED, one, other, adjusted=0.049).verdict == 1
    assert Comparison("MS", LETTER, other, one).verdict == -1
    assert Comparison("MS", TUNED, one, Spread()).verdict == 0 and Comparison("MS", TUNED, one, Spread({0: 0.9})).verdict == 0


def test_what_has_not_run_is_said_to_be_so_with_the_papers_figures_beside():
    (table,) = draw_tuned("cub", [])
    assert isinstance(table, Table) and len(table.rows) == 6
    assert table.rows[0][:3] == ["contrastive, tuned", NOT_YET, NOT_YET] and table.rows[0][-3:] == ["57.5", "61.9", "+4.4"]


def test_cub_completes_the_family(cars, tmp_path):
    records = Records(tmp_path)
    carry_out(records, [CARS, CUB])
    both = [Study(EXPERIMENT, setting, records) for setting in (CARS, CUB)]
    assert len(adjusted_p(both[0])) == 6 and adjusted_p(both[0]) == adjusted_p(both[1])
    assert "6 of the 6 gains that were declared for Holm's correction are in." in draw_tuned("cub", both[1:])


def test_other_trunks_come_after_googlenet_and_are_no_findings(cars, tmp_path):
    other = replace(CARS, trunk="efficientnet_lite0", weights="imagenet")
    records = Records(tmp_path)
    carry_out(records, [other], lambda task: bool(task.config.data.holdout))
    blocks = draw_tuned("cars", [Study(EXPERIMENT, other, records), cars])
    tables = [block for block in blocks if isinstance(block, Table) and block.header[0].startswith("R@1")]
    assert [table.header[0] for table in tables] == ["R@1, %, googlenet_bvlc", "R@1, %, efficientnet_lite0"]
    assert [row[0] for row in tables[1].rows] == [f"{loss}, {LETTER}" for loss in ORDER]
    assert not any(isinstance(block, Claim) and "efficientnet" in block for block in blocks)


def test_a_seed_fixes_head_and_batches_in_both_arms(tmp_path):
    """What the pairing rests on: the memory, the rate and the length change neither."""
    torch.set_num_threads(1)
    without, with_memory = (config_of(GLYPHS, arm.settings) for arm in tuned_arms(GLYPHS)[:2])
    with_memory = override(with_memory, {"optim.lr": 0.5, "optim.iterations": 7})
    assert with_memory.memory.ratio and not without.memory.ratio

    def run(config, seed):
        config = override(config, {"seed": seed})
        folder = tmp_path / f"{bool(config.memory.ratio)}_{seed}"
        return RunState(config, begin_run(config, folder), folder)

    one, other, next_seed = run(without, 3), run(with_memory, 3), run(with_memory, 4)
    heads = [dict(each.model.named_parameters()) for each in (one, other, next_seed)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert not all(torch.equal(heads[1][name], heads[2][name]) for name in heads[0])
    batches = [[each.data.sampler.batch(step).tolist() for step in range(40)] for each in (one, other, next_seed)]
    assert batches[0] == batches[1] != batches[2]
