import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.feeds import Batches, DecodeFeed, ResidentFeed, StoreFeed, sweep
from xbm_app.data.images import ImageSet
from xbm_app.data.samplers import PKSampler, ShuffleSampler
from xbm_app.data.store import open_store, prepare
from xbm_app.data.transforms import Augmentation

AUGMENTATIONS = {
    "crop": Augmentation(resize=26, crop=23),
    "resized_crop": Augmentation("resized_crop", resize=26, crop=23),
    "shift": Augmentation("shift", resize=26, crop=26, padding=3),
    "none": Augmentation("none", resize=26, crop=23, mean=(127 / 255,) * 3, std=(128 / 255,) * 3),
    "grey": Augmentation(resize=26, crop=23, mean=(0.5,), std=(0.25,), channels=1),
    "grey resized": Augmentation("resized_crop", resize=26, crop=23, mean=(0.5,), std=(0.25,), channels=1),
    "strong": Augmentation(resize=26, crop=23, strong=True),
}
BATCH = np.array([9, 0, 4, 11, 4, 2, 7])


@pytest.fixture
def images(tmp_path):
    root = tmp_path / "photos"
    root.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        shape = (28 + 3 * number, 61 - 2 * number)
        image = Image.fromarray(rng.integers(0, 256, (5, 4, 3), dtype=np.uint8))
        image.resize(shape, Image.Resampling.BICUBIC).save(root / f"{number}.jpg")
    return ImageSet("twelve", np.arange(12) // 3, list("abcd"), root=root, paths=[f"{n}.jpg" for n in range(12)])


def feeds_of(images, augmentation, folder, seed=5):
    store = open_store(prepare(images, folder, augmentation.resize, augmentation.mode, quiet=True), images)
    return [
        DecodeFeed(images, augmentation, seed),
        StoreFeed(store, augmentation, seed),
        ResidentFeed(store, augmentation, seed, quiet=True),
        ResidentFeed(images, augmentation, seed, quiet=True),
    ]


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_all_feeds_give_the_same_bits(images, tmp_path, name):
    augmentation = AUGMENTATIONS[name]
    decode, *others = feeds_of(images, augmentation, tmp_path / "store")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train, test = decode.train(BATCH, 31), decode.test(BATCH)
        for feed in others:
            assert torch.equal(feed.train(BATCH, 31), train)
            assert torch.equal(feed.test(BATCH), test)
            assert len(feed) == 12 and feed.labels.tolist() == images.labels.tolist()
    assert train.shape == test.shape == (7, augmentation.channels, augmentation.crop, augmentation.crop)
    assert train.dtype == test.dtype == torch.float32
    assert torch.equal(train[2], train[4])  # the same instance twice in a batch
    assert torch.equal(train, test) == (name == "none")
    assert torch.equal(decode.train(torch.from_numpy(BATCH), torch.tensor(31)), train)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_kernels_for_devices_give_what_the_others_give(images, name):
    augmentation = AUGMENTATIONS[name]
    feed = ResidentFeed(images, augmentation, seed=5, quiet=True)
    found, expected = feed.train_on_device(torch.from_numpy(BATCH), torch.tensor(31)), feed.train(BATCH, 31)
    if augmentation.kind != "resized_crop":
        assert torch.equal(found, expected)
    else:
        grey_levels = (found - expected).abs() * 255 * torch.tensor(augmentation.std)[:, None, None]
        assert grey_levels.max() < 1.01


def test_what_an_image_looks_like_depends_on_seed_step_and_id_only(images):
    feed = DecodeFeed(images, AUGMENTATIONS["crop"], seed=5)
    alone = feed.train(np.array([4]), 31)[0]
    assert torch.equal(feed.train(BATCH, 31)[2], alone)
    assert not torch.equal(feed.train(np.array([4]), 32)[0], alone)
    assert not torch.equal(DecodeFeed(images, AUGMENTATIONS["crop"], seed=6).train(np.array([4]), 31)[0], alone)


def test_pictures_in_memory_need_no_decoding(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (6, 17, 17), dtype=np.uint8)
    images = ImageSet("made", np.arange(6), list("abcdef"), pixels=grey)
    shift = Augmentation("shift", resize=17, crop=17, padding=2, flip=False, mean=(0.0,), std=(1 / 255,), channels=1)
    decode, store, resident, again = feeds_of(images, shift, tmp_path / "store")
    indices = np.array([5, 1])
    assert torch.equal(decode.test(indices)[:, 0], torch.from_numpy(grey[indices]).float())
    for feed in (store, resident, again):
        assert torch.equal(feed.train(indices, 3), decode.train(indices, 3))
    grown = DecodeFeed(images, Augmentation(resize=20, crop=18)).test(indices)
    assert grown.shape == (2, 3, 18, 18)


def test_a_resident_set_outlives_its_files(images):
    feed = ResidentFeed(images, AUGMENTATIONS["crop"], quiet=True)
    before = feed.train(BATCH, 1)
    for path in images.paths:
        (images.root / path).unlink()
    assert torch.equal(feed.train(BATCH, 1), before)


def test_a_store_of_another_size_is_refused(images, tmp_path):
    store = open_store(prepare(images, tmp_path / "store", 26, quiet=True), images)
    for augmentation in (Augmentation(resize=27, crop=23), AUGMENTATIONS["resized_crop"]):
        for make in (StoreFeed, ResidentFeed):
            with pytest.raises(InputError, match="holds images resized to 26 square, the augmentation needs"):
                make(store, augmentation)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_batches_are_the_same_for_any_number_of_workers_and_from_any_start(images, tmp_path, kind):
    feed = feeds_of(images, AUGMENTATIONS["crop"], tmp_path / "store")[kind]
    sampler = PKSampler(images.labels, 2, 2, seed=3)
    expected = [(step, feed.train(sampler.batch(step), step), sampler.batch(step)) for step in range(11)]
    for workers, start in ((0, 0), (1, 3), (2, 0), (5, 4), (None, 6)):
        found = list(Batches(feed, sampler, start, stop_step=11, workers=workers))
        assert [step for step, *_ in found] == list(range(start, 11))
        for (_, pixels, labels, ids), (_, same, indices) in zip(found, expected[start:]):
            assert torch.equal(pixels, same)
            assert ids.tolist() == indices.tolist() and ids.dtype == torch.int64
            assert labels.tolist() == images.labels[indices].tolist()


def test_batches_can_be_gone_through_again(images):
    batches = Batches(DecodeFeed(images, AUGMENTATIONS["crop"]), ShuffleSampler(12, 5, seed=0), stop_step=4, workers=2)
    first, second = ([images for _, images, *_ in batches] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second)) and len(first) == 4


def test_a_vanished_image_is_named_when_its_batch_is_due(images):
    feed, sampler = DecodeFeed(images, AUGMENTATIONS["crop"]), ShuffleSampler(12, 3, seed=0)
    gone = sampler.batch(2)[1]
    (images.root / images.paths[gone]).unlink()
    batches = iter(Batches(feed, sampler, workers=3))
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(InputError, match=rf"{gone}\.jpg is missing"):
        next(batches)
    assert not workers_left()


def workers_left():
    return [thread for thread in threading.enumerate() if thread.name.startswith("xbm-data")]


def test_leaving_the_loop_stops_the_workers(images):
    for step, *_ in Batches(DecodeFeed(images, AUGMENTATIONS["crop"]), ShuffleSampler(12, 3, seed=0), workers=2):
        if step == 5:
            break
    deadline = time.monotonic() + 30
    while workers_left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not workers_left()


@pytest.mark.slow
def test_ctrl_c_ends_a_run_at_once(images):
    # What is started in the background of a shell ignores Ctrl-C, and so do its children: not so here.
    code = """
import signal, sys, numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from xbm_app.data.feeds import Batches, DecodeFeed
from xbm_app.data.images import ImageSet
from xbm_app.data.samplers import ShuffleSampler
from xbm_app.data.transforms import Augmentation
paths = [path.name for path in sorted(Path(sys.argv[1]).iterdir())]
images = ImageSet("twelve", np.zeros(len(paths), np.int64), ["a"], Path(sys.argv[1]), paths)
for step, *_ in Batches(DecodeFeed(images, Augmentation()), ShuffleSampler(len(paths), 12, seed=0), workers=3):
    print(step, flush=True)
"""
    command = [sys.executable, "-c", code, str(images.root)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "0\n"
    run.send_signal(signal.SIGINT)
    try:
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_sweep_shows_every_image_once_in_order(images):
    feed = DecodeFeed(images, AUGMENTATIONS["crop"])
    for workers in (0, 3):
        found = list(sweep(feed, 5, workers))
        assert [len(ids) for *_, ids in found] == [5, 5, 2]
        assert torch.cat([ids for *_, ids in found]).tolist() == list(range(12))
        assert torch.cat([labels for _, labels, _ in found]).tolist() == images.labels.tolist()
        assert torch.equal(torch.cat([pixels for pixels, *_ in found]), feed.test(np.arange(12)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_on_a_gpu_the_resident_feed_gives_the_same_without_waiting_for_the_host(images, name):
    augmentation = AUGMENTATIONS[name]
    expected = ResidentFeed(images, augmentation, seed=5, quiet=True)
    feed = ResidentFeed(images, augmentation, seed=5, device="cuda", quiet=True)
    ids, step = torch.from_numpy(BATCH).cuda(), torch.tensor(30, device="cuda")
    feed.train(BATCH, 0)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        from_host, from_device, test = feed.train(BATCH, 31), feed.train(ids, step + 1), feed.test(BATCH)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(from_host, from_device)
    assert torch.equal(test.cpu(), expected.test(BATCH))
    grey_levels = (from_host.cpu() - expected.train(BATCH, 31)).abs() * 255 * torch.tensor(augmentation.std)[:, None, None]
    assert grey_levels.max() < (1.01 if augmentation.kind == "resized_crop" else 1e-9)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = feed.train(ids, step)
    for number in (31, 77):
        step.fill_(number)
        graph.replay()
        assert torch.equal(captured, feed.train(BATCH, number))

    sampler = ShuffleSampler(12, 5, seed=0)
    for number, pixels, labels, ids in Batches(DecodeFeed(images, augmentation, 5), sampler, stop_step=3, device="cuda"):
        assert pixels.is_cuda and labels.is_cuda and ids.is_cuda
        assert torch.equal(pixels.cpu(), expected.train(sampler.batch(number), number))
