import errno
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import xbm_app.data.store as store_module
from xbm.errors import InputError
from xbm_app.data.images import ImageSet
from xbm_app.data.store import Manifest, estimate, open_store, prepare, to_write
from xbm_app.data.transforms import fit, resized

SIDE = 20


@pytest.fixture
def images(tmp_path):
    """Seven pictures of all sorts: wide, high, a strip, grey, a palette, one turned by its EXIF flag."""
    root = tmp_path / "photos"
    (root / "b").mkdir(parents=True)
    rng = np.random.default_rng(0)
    paths = []
    for number, (height, width) in enumerate([(31, 47), (47, 31), (5, 300), (20, 20), (33, 20), (70, 61), (25, 40)]):
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        path = f"b/{number}.jpg" if number % 2 else f"{number}.png"
        if number == 3:
            image = image.convert("L")
        if number == 4:
            image = image.convert("P")
        exif = Image.Exif()
        exif[274] = 6 if number == 5 else 1
        image.save(root / path, exif=exif)
        paths.append(path)
    return ImageSet("seven", np.array([4, 4, 0, 1, 1, 2, 3]), list("abcde"), root=root, paths=paths)


@pytest.fixture(autouse=True)
def three_images_a_shard(monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_BYTES", 3 * 3 * SIDE**2 + 5)


def pixels_of(images, mode):
    return [fit(images.open(index), SIDE, mode) for index in range(len(images))]


def touch(path):
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize("mode", ["square", "shorter"])
@pytest.mark.parametrize("workers", [0, 3])
def test_a_store_serves_the_pixels_it_was_made_from(images, tmp_path, mode, workers):
    out = prepare(images, tmp_path / "store", SIDE, mode, workers, quiet=True)
    store = open_store(out, images)
    assert len(store) == 7
    assert store.labels.tolist() == images.labels.tolist() and store.labels.dtype == np.int64
    for index, expected in enumerate(pixels_of(images, mode)):
        assert np.array_equal(store.view(index), expected)
        assert expected.shape[:2] == (store.heights[index], store.widths[index])
    assert sorted(path.name for path in out.iterdir()) == [
        "checksums.json",
        "manifest.json",
        *(f"shard-{n:05d}.bin" for n in range(3)),
    ]
    assert (store.resize, store.mode) == (SIDE, mode)
    if mode == "shorter":
        assert (store.heights[5], store.widths[5]) == (SIDE, SIDE * 70 // 61)  # lies as a 70 × 61 file, stands upright here


def test_boxes_are_cut_before_resizing(images, tmp_path):
    boxes = np.tile(np.array([2, 1, 15, 4]), (7, 1))
    boxed = ImageSet("boxed", images.labels, images.class_names, images.root, images.paths, boxes)
    store = open_store(prepare(boxed, tmp_path / "store", SIDE, quiet=True), boxed)
    expected = images.open(6).crop((2, 1, 15, 4)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    assert np.array_equal(store.view(6), np.asarray(expected))


def test_pictures_in_memory_can_be_stored_too(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (5, SIDE, SIDE), dtype=np.uint8)
    images = ImageSet("made", np.arange(5), list("abcde"), pixels=grey)
    store = open_store(prepare(images, tmp_path / "store", SIDE, quiet=True), images)
    assert np.array_equal(store.view(4), grey[4][..., None].repeat(3, axis=2))
    other = ImageSet("made", np.arange(5), list("abcde"), pixels=grey[::-1].copy())
    with pytest.raises(InputError, match="pixels of 'made' have changed"):
        open_store(tmp_path / "store", other)


def test_a_selection_renumbers_images_and_classes_as_the_set_does(images, tmp_path):
    store = open_store(prepare(images, tmp_path / "store", SIDE, "shorter", quiet=True), images)
    indices = np.array([5, 0, 6, 1])
    part, same = store.select(indices), images.select(indices)
    assert part.labels.tolist() == same.labels.tolist()
    assert [part.view(index).tolist() for index in range(4)] == [store.view(index).tolist() for index in indices]


def test_big_jpegs_are_decoded_at_a_fraction_with_hardly_any_difference(tmp_path):
    smooth = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8))
    smooth.resize((400, 300), Image.Resampling.BICUBIC).save(tmp_path / "big.jpg", quality=95)
    images = ImageSet("one", np.array([0]), ["a"], root=tmp_path, paths=["big.jpg"])
    assert images.open(0).size == (400, 300)
    assert images.open(0, at_least=2 * SIDE).size == (100, 75)  # an eighth would leave 38 pixels, below 40
    difference = resized(images, SIDE, "square", 0).astype(int) - fit(images.open(0), SIDE, "square")
    assert abs(difference).max() <= 3


def test_prepare_goes_on_after_a_crash_and_keeps_finished_shards(images, tmp_path, monkeypatch):
    out = tmp_path / "store"

    def broken(images, size, mode, index):
        if index == 4:
            raise RuntimeError("power cut")
        return resized(images, size, mode, index)

    monkeypatch.setattr(store_module, "resized", broken)
    with pytest.raises(RuntimeError, match="power cut"):
        prepare(images, out, SIDE, workers=2, quiet=True)
    with pytest.raises(InputError, match=r"shard-00001\.bin is missing or cut short: run `xbm prepare` again"):
        open_store(out, images)
    (out / "shard-00001.part.bin").write_bytes(b"half")
    (out / "shard-00001.bin.part").write_bytes(b"half")  # the name in earlier versions
    before = (out / "shard-00000.bin").stat().st_mtime_ns

    asked = []
    monkeypatch.setattr(store_module, "resized", lambda *args: asked.append(args[3]) or resized(*args))
    assert to_write(images, out, SIDE) == 4 * 3 * SIDE**2
    prepare(images, out, SIDE, quiet=True)
    assert sorted(asked) == [3, 4, 5, 6]
    assert (out / "shard-00000.bin").stat().st_mtime_ns == before
    assert not list(out.glob("*.part*"))
    store = open_store(out, images)
    assert all(np.array_equal(store.view(i), pixels) for i, pixels in enumerate(pixels_of(images, "square")))


@pytest.mark.parametrize("draft", ["manifest.part.json", "manifest.json.part"])
def test_prepare_killed_before_its_first_file_was_whole_can_begin_again(images, tmp_path, draft):
    out = tmp_path / "store"
    out.mkdir()
    (out / draft).write_bytes(b"{")
    assert len(open_store(prepare(images, out, SIDE, quiet=True), images)) == 7


def test_prepare_survives_kill_9(images, tmp_path, monkeypatch):
    code = """
import sys, time, numpy as np
from pathlib import Path
from xbm_app.data import store
from xbm_app.data.images import ImageSet
store.SHARD_BYTES = 2 * 3 * 20**2
real = store.resized
def slow(*args):
    time.sleep(0.2)
    return real(*args)
store.resized = slow
paths = sys.argv[3:]
images = ImageSet("seven", np.array([4, 4, 0, 1, 1, 2, 3]), list("abcde"), Path(sys.argv[1]), paths)
store.prepare(images, Path(sys.argv[2]), 20, workers=1, quiet=True)
"""
    out = tmp_path / "store"
    run = subprocess.Popen([sys.executable, "-c", code, str(images.root), str(out), *images.paths])
    deadline = time.monotonic() + 60
    while not (out / "shard-00000.bin").exists():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    monkeypatch.setattr(store_module, "SHARD_BYTES", 2 * 3 * SIDE**2)
    assert 0 < len(list(out.glob("shard-*.bin"))) < 4
    prepare(images, out, SIDE, quiet=True)
    store = open_store(out, images)
    assert all(np.array_equal(store.view(i), pixels) for i, pixels in enumerate(pixels_of(images, "square")))


def test_a_shard_that_was_cut_short_is_not_served_and_is_made_anew(images, tmp_path):
    out = prepare(images, tmp_path / "store", SIDE, quiet=True)
    shard = out / "shard-00002.bin"
    whole = shard.read_bytes()
    for damaged in (whole[:-1], whole[:3], b""):
        shard.write_bytes(damaged)
        with pytest.raises(InputError, match=r"shard-00002\.bin is missing or cut short"):
            open_store(out, images)
    prepare(images, out, SIDE, quiet=True)
    assert shard.read_bytes() == whole


def test_a_changed_file_is_noticed_and_only_its_shard_is_made_anew(images, tmp_path):
    out = prepare(images, tmp_path / "store", SIDE, quiet=True)
    before = [path.stat().st_mtime_ns for path in sorted(out.glob("shard-*"))]
    touch(images.root / images.paths[4])
    with pytest.raises(InputError, match=r"4\.png has changed since .*: run `xbm prepare` again"):
        open_store(out, images)
    assert len(open_store(out, None)) == 7  # taken as it is
    prepare(images, out, SIDE, quiet=True)
    after = [path.stat().st_mtime_ns for path in sorted(out.glob("shard-*"))]
    assert [a == b for a, b in zip(before, after)] == [True, False, True]
    open_store(out, images)


def test_a_missing_file_is_named(images, tmp_path):
    out = prepare(images, tmp_path / "store", SIDE, quiet=True)
    (images.root / images.paths[1]).unlink()
    with pytest.raises(InputError, match=r"1\.jpg is missing"):
        open_store(out, images)
    with pytest.raises(InputError, match=r"1\.jpg is missing"):
        prepare(images, tmp_path / "other", SIDE, quiet=True)


def test_an_unreadable_image_stops_the_preparation_with_its_name(images, tmp_path):
    (images.root / images.paths[6]).write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"6\.png cannot be read as an image"):
        prepare(images, tmp_path / "store", SIDE, quiet=True)
    assert (tmp_path / "store" / "shard-00001.bin").exists()


def test_another_split_is_refused(images, tmp_path):
    out = prepare(images, tmp_path / "store", SIDE, quiet=True)
    relabelled = ImageSet("seven", images.labels[::-1].copy(), images.class_names, images.root, images.paths)
    boxed = ImageSet(
        "seven", images.labels, images.class_names, images.root, images.paths, np.tile(np.array([0, 0, 5, 5]), (7, 1))
    )
    reordered = images.select(np.array([1, 0, 2, 3, 4, 5, 6]))
    for other in (images.select(np.arange(6)), relabelled, boxed, reordered):
        with pytest.raises(InputError, match="whose paths, labels or boxes are not those"):
            open_store(out, other)


def test_prepare_does_not_overwrite_what_it_did_not_make(images, tmp_path):
    out = prepare(images, tmp_path / "store", SIDE, quiet=True)
    for other, size, mode in ((images.select(np.arange(6)), SIDE, "square"), (images, 21, "square"), (images, SIDE, "shorter")):
        with pytest.raises(InputError, match="delete it or choose another folder"):
            prepare(other, out, size, mode, quiet=True)
    open_store(out, images)
    with pytest.raises(InputError, match="not empty and not a store"):
        prepare(images, images.root, SIDE, quiet=True)
    assert len(list(images.root.iterdir())) == 5


def test_the_store_of_a_set_is_found_among_several(images, tmp_path):
    train, test = images.select(np.arange(4), "train"), images.select(np.arange(4, 7), "test")
    for part in (train, test):
        prepare(part, tmp_path / "all" / part.name, SIDE, quiet=True)
    assert open_store(tmp_path / "all", test).path == tmp_path / "all" / "test"
    with pytest.raises(InputError, match="has no store of the 7 images of 'seven', only test, train"):
        open_store(tmp_path / "all", images)
    with pytest.raises(InputError, match="name one of test, train"):
        open_store(tmp_path / "all", None)


def test_what_is_no_store_is_refused_in_a_sentence(images, tmp_path):
    with pytest.raises(InputError, match="is no image store: make one with `xbm prepare"):
        open_store(tmp_path / "nowhere", images)
    out = prepare(images, tmp_path / "store", SIDE, quiet=True)
    manifest = (out / "manifest.json").read_text()
    (out / "checksums.json").unlink()
    (out / "manifest.json").write_text(manifest.replace('"format": 1', '"format": 99'))
    with pytest.raises(InputError, match="has format 99, this version reads 1"):
        open_store(out, images)
    (out / "manifest.json").write_text(manifest[:-9])
    with pytest.raises(InputError, match="cannot be read: delete"):
        open_store(out, images)
    with pytest.raises(InputError, match="unknown resize mode 'long'"):
        prepare(images, tmp_path / "other", SIDE, "long", quiet=True)


def test_the_estimate_is_exact_for_squares_and_close_for_the_rest(images, tmp_path):
    assert estimate(images, SIDE) == 7 * 3 * SIDE**2
    out = prepare(images, tmp_path / "store", SIDE, "shorter", quiet=True)
    written = sum(path.stat().st_size for path in out.glob("shard-*"))
    assert abs(estimate(images, SIDE, "shorter") / written - 1) < 0.05
    assert to_write(images, out, SIDE, "shorter") == 0


def test_too_little_disk_is_told_before_anything_is_written(images, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=8000))
    with pytest.raises(InputError, match=r"needs about .* GB and its disk has .* GB free: make room"):
        prepare(images, tmp_path / "store", SIDE, quiet=True)
    assert not (tmp_path / "store").exists()


def test_a_disk_that_fills_up_is_a_sentence_and_finished_shards_stay(images, tmp_path, monkeypatch):
    write = store_module._write

    def full(path, parts):
        if path.name == "shard-00001.bin":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, parts)

    monkeypatch.setattr(store_module, "_write", full)
    with pytest.raises(InputError, match="is full: make room and run it again, finished shards are kept"):
        prepare(images, tmp_path / "store", SIDE, quiet=True)
    assert (tmp_path / "store" / "shard-00000.bin").exists()


def test_shards_stay_below_256_megabytes(monkeypatch):
    monkeypatch.undo()
    for resize in (32, 224, 256, 288, 1000):
        per_shard = Manifest("", resize, "shorter", [0] * 9, None, None, None, None, None).per_shard
        assert per_shard * 4 * resize**2 * 3 + 8 * per_shard + 4 < 256e6
