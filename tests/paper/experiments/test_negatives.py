import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paper.experiments import EXPERIMENTS
from paper.experiments.negatives import (
    EDGES,
    NEGATIVES,
    QUERIES,
    gradient_shares,
    measure_mined,
    measure_retrieved,
    weight_shares,
)
from paper.page import Claim, Figure, Pictures
from tests.tiny import tiny_config
from xbm.losses import ContrastiveLoss, MultiSimilarityLoss
from xbm.memory import CrossBatchMemory
from xbm_app.train.dataset import begin_run, read_run
from xbm_app.train.finish import mined_negatives, write_examples
from xbm_app.train.loop import train
from xbm_app.train.state import RunState


def test_valid_negatives_from_batch_and_memory(drawn):
    figure, table, claim = drawn("valid-negatives")
    assert [line["label"] for line in figure.data["panels"][0]["lines"]] == ["from the batch", "from the memory"]
    assert table.rows == [["efficientnet_lite0", "17", "8", "1,500", "1,000"]]
    assert isinstance(claim, Claim) and "8 valid negatives per iteration from the batch and 1,000 from the memory" in claim


def test_weights_are_compared_on_the_same_pairs(drawn):
    figure, table, _, claim = drawn("ms-outliers")
    assert "multi-similarity gives 75.0 % to the hardest one, contrastive 25.0 %" in claim
    assert isinstance(figure, Figure) and len(figure.data["panels"]) == 2
    assert table.rows[0][1:] == ["100", "4.0", "25.0", "50.0", "10.0"] and table.rows[1][3] == "75.0"
    assert not any("triplet" in row[0] for row in table.rows)  # it had no anchor to tell about


def test_mined_negatives_are_rows_of_pictures_and_their_absence_is_told(drawn):
    uniform, hardest = drawn("mined")
    assert isinstance(uniform, Pictures) and "no anchor" in hardest
    assert len(uniform.rows) == 1  # of the two anchors with one positive, and so of one class
    assert [(tile.image, tile.frame, tile.text) for tile in uniform.rows[0]] == [
        (1, "anchor", "anchor"), (2, "positive", "positive"), (3, "batch", "0.40"), (4, "batch", "0.30"),
        (5, "memory", "0.90"), (6, "memory", "0.80"),
    ]  # fmt: skip


def test_where_both_fail_is_shown_and_all_outcomes_are_counted(drawn):
    summary, fails = drawn("retrieved")
    assert (
        "of 3 random queries" in summary
        and "right in both runs for 1, only with memory for 0, only without for 0, in neither for 2" in summary
    )
    assert isinstance(fails, Pictures) and [len(row) for row in fails.rows] == [3, 3, 0, 3, 3]  # without and with, twice
    assert fails.rows[0][0].image == 7 and [tile.frame for tile in fails.rows[0]] == ["anchor", "wrong", "right"]
    assert fails.rows[0][2].text == "0.80 right" and fails.rows[0][1].text == "0.90"
    assert [row[0].text for row in fails.rows[:2]] == ["without", "with"]


def test_nothing_run_nothing_drawn():
    for name in ("valid-negatives", "ms-outliers", "mined", "retrieved"):
        assert EXPERIMENTS[name].draw("sop", []) == []


S = torch.tensor([[0.9, 0.95, 0.6, 0.4], [0.8, 0.1, 0.2, 0.3]])
POSITIVE = torch.tensor([[True, False, False, False]] * 2)


def test_contrastive_weighs_valid_negatives_alike():
    """The first anchor has two negatives above 0.5, the second none."""
    measured = weight_shares(ContrastiveLoss(), S, POSITIVE, ~POSITIVE)
    assert measured["anchors"] == 1 and measured["valid"] == 2 and measured["effective"] == pytest.approx(2)
    assert measured["hardest"] == pytest.approx(0.5) and measured["very_hard"] == pytest.approx(0.5)
    assert measured["very_hard_count"] == pytest.approx(0.5)
    bins = dict(zip(EDGES, measured["bins"]))
    assert bins[0.9] + bins[0.95] == pytest.approx(0.5) and bins[0.55] + bins[0.6] == pytest.approx(0.5)
    assert sum(measured["bins"]) == pytest.approx(1)


def test_multi_similarity_gives_the_hardest_nearly_all():
    measured = weight_shares(MultiSimilarityLoss(mining=False), S[:1], POSITIVE[:1], ~POSITIVE[:1])
    weights = [math.exp(40 * (s - 0.5)) for s in (0.95, 0.6, 0.4)]
    shares = [w / sum(weights) for w in weights]
    assert measured["hardest"] == pytest.approx(shares[0], rel=1e-4)
    assert measured["effective"] == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-4)


def test_nobody_with_a_negative_is_said():
    none = torch.zeros_like(POSITIVE)
    assert weight_shares(ContrastiveLoss(), S, POSITIVE, none) == {"anchors": 0}


def run_of(rows, labels, anchors, folder):
    """A run whose model returns the given rows, whose memory contains all of them, and whose batch is `anchors`."""
    rows, labels = F.normalize(torch.tensor(rows, dtype=torch.float32)), np.array(labels)
    memory = CrossBatchMemory(len(rows), rows.shape[1])
    memory.enqueue(rows, torch.from_numpy(labels), torch.arange(len(rows)))
    run = SimpleNamespace(
        folder=folder,
        autocast=nullcontext(),
        data=SimpleNamespace(
            sampler=SimpleNamespace(batch=lambda step: np.array(anchors)),
            batches_per_step=1,
            feed=SimpleNamespace(test=lambda indices: torch.from_numpy(np.asarray(indices))),
        ),
        config=SimpleNamespace(optim=SimpleNamespace(iterations=1)),
        dataset=SimpleNamespace(train=SimpleNamespace(labels=labels)),
        model=Table(rows),
        memory=memory,
        device=torch.device("cpu"),
    )
    write_examples(run, mined_negatives(run))
    return run


class Table(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, indices):
        return self.rows[indices]


def fan(angles):
    return [[np.cos(a), np.sin(a)] for a in angles]


def test_negatives_are_taken_evenly_from_hard_to_simple(tmp_path):
    """Image 0 and its positive 1 at angle 0; 31 negatives fan out: those within 60 degrees pass 0.5."""
    degrees = np.arange(1, 94, 3)
    mined = measure_mined(run_of(fan(np.radians([0, 0, *degrees])), [0, 0, *[1] * 31], [0], tmp_path))
    (row,) = mined["uniform"]
    hard = [2 + k for k, d in enumerate(degrees) if d < 60]
    assert row["anchor"] == 0 and row["positive"] == 1
    images = [image for image, _ in row["memory"]]
    assert len(images) == NEGATIVES and images[0] == hard[0] and images[-1] == hard[-1] and images == sorted(images)
    assert row["memory"][0][1] == pytest.approx(np.cos(np.radians(1)), abs=1e-4)
    (hardest,) = mined["hardest"]
    assert [image for image, _ in hardest["memory"]] == hard[:NEGATIVES] and hardest["positive"] == 1


def test_only_anchors_with_hard_enough_negatives_are_shown(tmp_path):
    """The nearest negative is 50 degrees away: 0.64, and only two pass 0.5."""
    mined = measure_mined(run_of(fan(np.radians([0, 5, 50, 55, 80])), [0, 0, 1, 1, 1], [0], tmp_path))
    assert mined == {"uniform": [], "hardest": []}


def test_the_batchs_own_negatives_stand_beside_them(tmp_path):
    mined = measure_mined(run_of(fan(np.radians([0, 0, *range(1, 13)])), [0, 0, *[1] * 12], [0, 13, 5], tmp_path))
    for rows in mined.values():
        row = next(each for each in rows if each["anchor"] == 0)
        assert [image for image, _ in row["batch"]] == [5, 13]


def test_without_a_memory_there_is_nothing_to_mine(tmp_path):
    run = run_of(fan([0, 1]), [0, 1], [0], tmp_path)
    run.memory = None
    assert measure_mined(run) == {"uniform": [], "hardest": []}


def test_the_same_queries_in_every_run(tmp_path):
    count = QUERIES + 50

    class Set(SimpleNamespace):
        def __len__(self):
            return count

    protocol = SimpleNamespace(query=Set(labels=np.arange(count) // 2), gallery=None)
    run = SimpleNamespace(folder=tmp_path, dataset=SimpleNamespace(protocols=[protocol]))
    near = np.stack([np.arange(count) ^ 1, np.zeros(count, int)], axis=1)

    def retrieved(neighbours, similarity):
        write_examples(run, {"neighbours": neighbours, "similarities": np.full((count, 2), similarity)})
        return measure_retrieved(run)

    one, other = retrieved(near, 0.5), retrieved(near[:, ::-1], 0.25)
    assert one["queries"] == other["queries"] and len(set(one["queries"])) == QUERIES
    assert all(right[0] == 1 for right in one["right"])  # the neighbor's number differs in the last bit: the same class
    assert one["neighbours"][3] == [one["queries"][3] ^ 1, 0] and other["similarities"][0] == [0.25, 0.25]


# ------------------------------------------------------------------ the components of a gradient


@pytest.mark.parametrize("reduction", ["sum", "balanced"])
def test_the_parts_of_a_gradient_by_hand(own_photos, tmp_path, reduction):
    config = tiny_config(
        own_photos, loss__reduction=reduction, loss__options="{margin: -0.9}", memory__start=1, optim__iterations=4
    )
    train(config, tmp_path / "run", quiet=True)
    run = RunState(config, read_run(config, tmp_path / "run"), tmp_path / "run")
    run.restore()
    run.model.eval()
    truth = np.asarray(run.dataset.train.labels)
    shares = gradient_shares(run, truth)
    assert shares["false"] == 0.0  # all labels are right
    indices = run.data.sampler.batch(run.data.batches_per_step * 4)
    anchors = run.model(run.data.feed.test(indices)).detach()
    rows, ids, labels = run.memory.embeddings, run.memory.ids.numpy(), truth[indices]
    positives = [np.flatnonzero((truth[ids] == label) & (ids != i)) for i, label in zip(indices, labels)]
    pulls = [rows[list(each)].sum(0).norm().item() for each in positives]
    assert shares["memory"]["pull"] == pytest.approx(np.mean(pulls), rel=1e-3)
    assert shares["memory"]["pull_weight"] == pytest.approx(np.mean([len(each) for each in positives]), rel=1e-3)
    near = (anchors @ rows.T).numpy() > -0.9
    negatives = [((truth[ids] != label) & near[k]).sum() for k, label in enumerate(labels)]
    pushes = [min(n, max(len(p), 1)) if reduction == "balanced" else n for n, p in zip(negatives, positives)]
    assert shares["memory"]["push_weight"] == pytest.approx(np.mean(pushes), rel=1e-3)
    assert shares["age"]["rows"] == run.memory.ages.median()


def test_pushes_at_images_of_the_anchors_own_class_are_false(own_photos, tmp_path):
    config = tiny_config(own_photos, loss__options="{margin: -0.9}", memory__start=1, optim__iterations=4)
    train(config, tmp_path / "run", quiet=True)
    run = RunState(config, begin_run(config, tmp_path / "run"), tmp_path / "run")
    run.restore()
    run.model.eval()
    assert gradient_shares(run, np.zeros(len(run.dataset.train), np.int64))["false"] == 1.0
