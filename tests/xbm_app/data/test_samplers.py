import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xbm.errors import InputError
from xbm_app.data.samplers import PKSampler, ShuffleSampler, deal, scramble, stream

MASK = (1 << 64) - 1
SIZES = [1, 2, 3, 4, 5, 9, 13, 26, 7, 1, 4]  # images a class


def labels_of(sizes):
    """Labels with gaps between them and images of a class far apart."""
    labels = np.repeat(np.arange(len(sizes)) * 7 + 3, sizes)
    return labels[np.random.default_rng(1).permutation(len(labels))]


def epoch_of(sampler, epoch):
    start = epoch * sampler.steps_per_epoch
    return [sampler.batch(step) for step in range(start, start + sampler.steps_per_epoch)]


def splitmix64(word):
    """As published, on Python's unbounded integers."""
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_scramble_is_splitmix64_in_numpy_and_in_torch():
    words = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 1000)
    expected = [splitmix64(int(word) & MASK) for word in words]
    assert [int(word) & MASK for word in scramble(words)] == expected
    assert [int(word) & MASK for word in scramble(torch.from_numpy(words))] == expected


def test_streams_depend_on_seed_step_and_id_and_on_nothing_else():
    ids = np.array([5, 0, 123_456_789, 5])
    words = stream(7, 31, ids)
    assert words[0] == words[3]
    assert torch.equal(stream(7, torch.tensor(31), torch.from_numpy(ids)), torch.from_numpy(words))
    near = {int(stream(s, t, np.array([i]))[0]) for s in range(-2, 6) for t in range(8) for i in range(8)}
    assert len(near) == 8 * 8 * 8  # neither swapping nor adding up seed, step and id gives the same word


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_epoch_covers_every_image_in_batches_of_p_distinct_classes(data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=14))
    P, K = data.draw(st.integers(1, len(sizes))), data.draw(st.integers(1, 6))
    labels = labels_of(sizes)
    sampler = PKSampler(labels, P, K, seed=data.draw(st.integers(-(2**70), 2**70)))
    groups = [-(-size // K) for size in sizes]
    assert sampler.steps_per_epoch == max(-(-sum(groups) // P), max(groups))  # no fewer batches can hold them

    for epoch in (0, 3):
        batches = np.stack(epoch_of(sampler, epoch)).reshape(-1, P, K)
        classes = labels[batches]
        assert (classes == classes[:, :, :1]).all()
        assert all(len(set(batch)) == P for batch in classes[:, :, 0].tolist())
        assert set(batches.ravel().tolist()) == set(range(len(labels)))
        for group in batches.reshape(-1, K):
            size = (labels == labels[group[0]]).sum()
            assert len(set(group.tolist())) == min(size, K)  # distinct images where the class has enough


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 30), min_size=4, max_size=12))
def test_extra_groups_go_to_the_classes_in_turn(sizes):
    K, P = 3, 4
    labels = np.repeat(np.arange(len(sizes)), sizes)
    batches = np.stack(epoch_of(PKSampler(labels, P, K, seed=2), 0)).reshape(-1, P, K)
    shown = np.bincount(labels[batches[:, :, 0]].ravel(), minlength=len(sizes))
    groups = -(-np.array(sizes) // K)
    extra = shown - groups
    assert (extra >= 0).all()
    assert extra.sum() == len(batches) * P - groups.sum()
    if groups.max() <= -(-groups.sum() // P):
        assert extra.sum() < P


def test_classes_are_balanced_over_several_epochs():
    labels = labels_of([10] * 9)
    sampler = PKSampler(labels, 4, 2, seed=5)
    seen = np.concatenate([batch for epoch in range(20) for batch in epoch_of(sampler, epoch)])
    per_class = np.unique(labels[seen], return_counts=True)[1]
    per_image = np.bincount(seen)
    assert per_class.max() / per_class.min() < 1.08
    assert per_image.min() >= 20 and per_image.max() <= 30


def test_one_class_with_most_of_the_images_is_in_every_batch_and_the_others_take_turns():
    sizes = [200, 3, 4, 5, 2, 6]
    labels = np.repeat(np.arange(6), sizes)
    sampler = PKSampler(labels, 3, 2, seed=0)
    assert sampler.steps_per_epoch == 100
    batches = np.stack(epoch_of(sampler, 1)).reshape(100, 3, 2)
    classes = labels[batches[:, :, 0]]
    assert (classes == 0).sum() == 100
    others = np.bincount(classes.ravel())[1:]
    assert others.sum() == 200 and others.max() - others.min() <= 4  # 1 to 3 groups of their own, then in turn
    places = np.bincount((classes == 0).argmax(axis=1))
    assert len(places) == 3 and places.min() > 15  # no rank gets the large class every time


def test_a_tight_deal_leaves_no_place_free():
    groups = np.array([5, 1, 5, 1, 1, 5, 1, 1])  # 20 groups, 5 batches of 4: three classes must be in every batch
    deck = np.repeat(np.arange(8), groups)
    for seed in range(20):
        dealt = deal(groups, 4, np.random.default_rng(seed).permutation(deck), np.arange(8))
        assert sorted(dealt.ravel().tolist()) == deck.tolist()
        assert all(len(set(batch)) == 4 for batch in dealt.tolist())


def test_batches_mix_classes_anew_each_epoch():
    labels = np.repeat(np.arange(20), 40)
    sampler = PKSampler(labels, 5, 4, seed=0)
    first, second = epoch_of(sampler, 0), epoch_of(sampler, 1)
    assert not any(set(a.tolist()) == set(b.tolist()) for a in first for b in second)
    together = np.zeros((20, 20), int)
    for batch in first + second:
        classes = np.unique(labels[batch])
        together[np.ix_(classes, classes)] += 1
    assert (together > 0).mean() > 0.95  # nearly all pairs of classes meet within two epochs


@pytest.mark.parametrize(
    "make", [lambda **kw: PKSampler(labels_of(SIZES), 4, 3, **kw), lambda **kw: ShuffleSampler(75, 8, **kw)]
)
class TestBothSamplers:
    def test_any_step_can_be_asked_for_at_any_time(self, make):
        whole = make(seed=9)
        steps = range(3 * whole.steps_per_epoch + 2)
        expected = [whole.batch(step).tolist() for step in steps]
        resumed = make(seed=9)
        for step in np.random.default_rng(0).permutation(len(steps)).tolist():
            assert resumed.batch(step).tolist() == expected[step]
        assert make(seed=10).batch(0).tolist() != expected[0]
        assert len({tuple(batch) for batch in expected}) == len(expected)

    def test_ranks_share_a_batch_without_overlap_in_rank_order(self, make):
        whole = make(seed=4)
        for world in (2, 3, 4):
            parts = [make(seed=4, rank=rank, world=world) for rank in range(world)]
            for step in range(whole.steps_per_epoch + 1):
                assert np.concatenate([part.batch(step) for part in parts]).tolist() == whole.batch(step).tolist()
                assert all(len(part.batch(step)) for part in parts)

    def test_impossible_ranks_and_steps_are_refused(self, make):
        for kwargs in ({"rank": 2, "world": 2}, {"rank": -1, "world": 2}, {"rank": 0, "world": 100}):
            with pytest.raises(InputError, match=r"rank|processes"):
                make(seed=0, **kwargs)
        with pytest.raises(InputError, match="step must be at least 0"):
            make(seed=0).batch(-1)

    def test_a_batch_may_be_changed_without_changing_the_next_call(self, make):
        sampler = make(seed=3)
        before = sampler.batch(1).copy()
        sampler.batch(1)[:] = -1
        assert sampler.batch(1).tolist() == before.tolist()


def test_shuffle_covers_every_image_once_and_fills_the_last_batch_with_others():
    sampler = ShuffleSampler(23, 5, seed=1)
    for epoch in range(4):
        batches = epoch_of(sampler, epoch)
        assert all(len(set(batch.tolist())) == 5 for batch in batches)
        assert sorted(np.concatenate(batches)[:23].tolist()) == list(range(23))
    assert [len(batches), sampler.steps_per_epoch] == [5, 5]


def test_two_processes_with_other_hash_seeds_share_the_batches_of_one():
    code = (
        "import json, sys, numpy as np; from xbm_app.data.samplers import PKSampler;"
        "s = PKSampler(np.array(json.loads(sys.argv[1])), 5, 2, seed=8, rank=int(sys.argv[2]), world=2);"
        "print(json.dumps([s.batch(t).tolist() for t in range(2 * s.steps_per_epoch)]))"
    )
    labels = labels_of(SIZES)
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(labels.tolist()), str(rank)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1)},
        )
        for rank in range(2)
    ]
    first, second = (json.loads(run.communicate(timeout=60)[0]) for run in runs)
    whole = PKSampler(labels, 5, 2, seed=8)
    assert len(first) == 2 * whole.steps_per_epoch
    for step, (a, b) in enumerate(zip(first, second)):
        assert a + b == whole.batch(step).tolist()
        assert {*labels[a].tolist()}.isdisjoint(labels[b].tolist())


def test_batches_are_the_same_on_every_machine():
    labels = np.repeat(np.arange(len(SIZES)), SIZES)
    assert PKSampler(labels, 3, 2, seed=42).batch(11).tolist() == [37, 56, 30, 33, 16, 18]
    assert ShuffleSampler(1000, 6, seed=42).batch(500).tolist() == [150, 431, 474, 969, 435, 947]


def test_impossible_batches_are_refused():
    with pytest.raises(InputError, match="needs 3 different classes but there are 2"):
        PKSampler(np.array([0, 0, 5]), 3, 2, seed=0)
    with pytest.raises(InputError, match="at least 1"):
        PKSampler(np.array([0, 0, 5]), 1, 0, seed=0)
    with pytest.raises(InputError, match="batch_size must be 1 to 4"):
        ShuffleSampler(4, 5, seed=0)
