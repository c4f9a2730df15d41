from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from xbm.errors import InputError
from xbm_app.data.samplers import StreamSampler

P, K = 4, 3


def world(images=600, classes=50, shards=5, seed=0):
    labels = np.random.default_rng(seed).permutation(np.arange(images) % classes)
    return labels, np.arange(images) * shards // images


def sampler_of(labels, shards, seed=0, buffer=120, **how):
    return StreamSampler(labels, shards, P, K, seed, buffer, **how)


def test_a_batch_has_k_images_of_p_classes():
    labels, shards = world()
    sampler = sampler_of(labels, shards)
    for step in range(2 * sampler.steps_per_epoch):
        batch = sampler.batch(step).reshape(P, K)
        assert (labels[batch] == labels[batch[:, :1]]).all() and len(set(labels[batch[:, 0]])) == P


def test_every_image_is_read_once_an_epoch_in_the_order_of_the_shards():
    labels, shards = world()
    sampler = sampler_of(labels, shards)
    order = sampler.order(0)
    runs = [int(shards[k]) for k in order]
    assert sorted(order) == list(range(600)) and len([1 for a, b in pairwise(runs) if a != b]) == 4
    assert sampler.order(1).tolist() != order.tolist()
    seen = Counter(int(i) for step in range(3 * sampler.steps_per_epoch) for i in sampler.batch(step))
    assert len(seen) == 600 and max(seen.values()) <= 4  # twelve classes wait here with images of the epoch before


def test_a_batch_comes_from_the_buffer():
    labels, shards = world(6_000)
    sampler = sampler_of(labels, shards, buffer=300)
    place = {int(index): k for k, index in enumerate(sampler.order(0))}
    for step in range(300):
        places = [place[int(index)] for index in sampler.batch(step)]
        assert max(places) < 300 + (step + 1) * P * K
        if step > 100:
            assert min(places) > step * P * K - 3_000  # nothing waits for ever


def test_batches_depend_on_the_seed_only_and_may_be_asked_for_again():
    labels, shards = world()
    one, two, other = (sampler_of(labels, shards, seed) for seed in (3, 3, 4))
    batches = [one.batch(step).tolist() for step in range(40)]
    assert [two.batch(step).tolist() for step in (39, 7, 8)] == [batches[step] for step in (39, 7, 8)]
    assert [other.batch(step).tolist() for step in range(40)] != batches


def test_a_state_continues_bit_for_bit_however_far_batches_were_made():
    labels, shards = world()
    whole = sampler_of(labels, shards)
    batches = [whole.batch(step).tolist() for step in range(150)]
    state = whole.state(61)
    resumed = sampler_of(labels, shards)
    resumed.load_state(state)
    assert [resumed.batch(step).tolist() for step in range(61, 150)] == batches[61:]
    again = resumed.state(100)
    assert all((again[name] == whole.state(100)[name]).all() for name in again)
    assert state["groups"].numel() + state["waiting"].numel() < 400  # no more than the buffer


def test_rare_classes_repeat_their_images_and_do_not_fill_the_buffer():
    labels = np.r_[np.arange(400) % 200, np.full(200, 200)]
    labels = np.random.default_rng(0).permutation(labels)
    sampler = sampler_of(labels, np.zeros(600, np.int64), buffer=60)
    seen = set()
    for step in range(200):
        batch = sampler.batch(step)
        assert len(set(labels[batch])) == P
        seen |= set(batch.tolist())
        assert sampler._head.held <= 60
    assert len(seen) == 600


def test_the_ranks_share_each_batch():
    labels, shards = world()
    whole, parts = sampler_of(labels, shards), [sampler_of(labels, shards, rank=r, world=2) for r in range(2)]
    for step in range(20):
        assert np.concatenate([part.batch(step) for part in parts]).tolist() == whole.batch(step).tolist()


def test_what_cannot_make_a_batch_is_refused():
    labels = np.arange(600) // 200
    with pytest.raises(InputError, match="4 different classes"):
        sampler_of(labels, np.zeros(600))
    with pytest.raises(InputError, match="at least two batches, 24 images, got 23"):
        sampler_of(*world(), buffer=23)
    with pytest.raises(InputError, match=r"only 2 classes, and a batch needs 4: increase batch\.buffer"):
        sampler_of(np.arange(600) // 100, np.zeros(600)).batch(0)
