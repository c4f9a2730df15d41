import math

import pytest
import torch
from torch.nn.functional import normalize

from xbm_app.train.watch import Watch, spread_of


def test_spread_of_known_batches():
    cosine, rank = spread_of(torch.eye(5, 7))
    assert cosine == 0 and rank == pytest.approx(5)
    cosine, rank = spread_of(torch.eye(7)[[2, 2, 2]])
    assert cosine == pytest.approx(1) and rank == pytest.approx(1, abs=1e-3)
    cosine, rank = spread_of(torch.eye(7)[[0, 0, 1, 1]])  # two directions, in equal parts
    assert cosine == pytest.approx(1 / 3) and rank == pytest.approx(2, abs=1e-3)


def test_spread_is_taken_without_a_gradient():
    anchors = normalize(torch.randn(5, 3)).requires_grad_()
    assert not any(value.requires_grad for value in spread_of(anchors))


def test_a_collapse_is_said_once():
    watch = Watch(memory_start=100, remedies=("memory.reduction=balanced",), smaller=("a smaller memory.ratio",))
    assert watch.look({"step": 9, "mean_cosine": 0.5, "effective_rank": 20.0}) == []
    (said,) = watch.look({"step": 19, "mean_cosine": 0.995, "effective_rank": 20.0})
    assert "iteration 19: the embeddings are collapsing (mean cosine 0.995" in said
    assert said.endswith(": try memory.reduction=balanced, a lower optim.lr, or a smaller memory.ratio")
    assert watch.look({"step": 29, "mean_cosine": 0.999, "effective_rank": 1.0}) == []
    assert watch.notes == [("warning", said)]


def test_only_what_the_run_lacks_and_can_have_is_advised():
    (said,) = Watch(memory_start=100).look({"step": 19, "mean_cosine": 0.995})
    assert said.endswith(": try a lower optim.lr")
    (said,) = Watch(0, age=20).look(line(drift_10=1.5))
    assert said.endswith("cannot help; try a lower optim.lr or a later memory.start")
    (said,) = Watch(0, larger=("a larger memory.ratio",)).look(line(valid_positives_memory=0.0))
    assert said.endswith(": try a larger memory.ratio or leaving out classes of a single image")


def test_a_low_rank_is_a_collapse_too():
    assert "effective rank 1.5" in Watch(0).look({"step": 3, "mean_cosine": 0.1, "effective_rank": 1.5})[0]


def test_a_fall_since_the_memory_started_is_said_once():
    watch = Watch(memory_start=100)
    assert watch.look({"step": 49, "recall@1": 0.60}) == []
    assert watch.look({"step": 99, "recall@1": 0.55}) == []  # without memory: nothing to blame it for
    assert watch.look({"step": 149, "recall@1": 0.54}) == []  # within what chance does
    (said,) = watch.look({"step": 199, "recall@1": 0.40})
    assert "iteration 199: R@1 fell from 55.0 to 40.0 since the memory started" in said and "memory.start" in said
    assert watch.look({"step": 249, "recall@1": 0.30}) == []


def test_nothing_is_said_without_figures():
    watch = Watch(memory_start=0)
    assert watch.look({"step": 1, "mean_cosine": math.nan, "recall@1": math.nan}) == []
    assert watch.look({"step": 2, "recall@1": 0.0}) == []  # no score from before to compare with


def test_what_was_said_and_seen_is_kept_through_a_resume():
    watch, other = Watch(memory_start=10), Watch(memory_start=10)
    watch.look({"step": 5, "recall@1": 0.9, "mean_cosine": 1.0})
    other.load_state_dict(watch.state_dict())
    assert other.notes == watch.notes and other.look({"step": 6, "mean_cosine": 1.0}) == []
    assert len(other.look({"step": 20, "recall@1": 0.1})) == 1


def line(**values):
    return {"step": 49, "valid_negatives_memory": 400.0, "valid_positives_memory": 100.0, **values}


def test_a_sum_whose_negatives_outweigh_its_positives_is_said_once_and_with_the_way_out():
    watch = Watch(0, summed=True)
    assert watch.look(line(valid_negatives_memory=290.0)) == []
    (said,) = watch.look(line())
    assert "iteration 49: the memory's negatives outweigh its positives 4 to 1" in said and "memory.reduction=balanced" in said
    assert watch.look(line()) == []
    assert Watch(0, summed=False).look(line()) == []  # balanced: however many there are


def test_a_memory_that_cannot_help_says_why():
    (said,) = Watch(0, summed=True).look(line(valid_positives_memory=0.0))
    assert "held no positive for any anchor" in said
    (said,) = Watch(0).look(line(valid_negatives_memory=0.0))
    assert "no negative of the memory is near enough" in said
    (said,) = Watch(0, negatives=False).look(line(valid_negatives_memory=0.0))
    assert "there is one training class" in said
    (said,) = Watch(0, positives=False).look(line(valid_negatives_memory=0.0, valid_positives_memory=0.0))
    assert "no training class has two images" in said
    assert Watch(0).look(line(valid_negatives_memory=math.nan, valid_positives_memory=math.nan)) == []  # not on yet


def test_rows_that_are_lost_to_drift_are_named_with_their_age():
    assert Watch(0, age=99).look(line(drift_100=1.5)) == []  # rows are younger than that
    assert Watch(0, age=150).look(line(drift_100=0.9, drift_1000=1.5)) == []
    (said,) = Watch(0, age=150).look(line(drift_10=0.2, drift_100=1.5))
    assert "in 100 steps an image moves by 1.50" in said and "150 steps old on average" in said and "optim.lr" in said
