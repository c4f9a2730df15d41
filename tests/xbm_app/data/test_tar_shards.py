import io
import json
import tarfile
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from tests.xbm_app.data.shard_files import picture, write_shard, write_tar
from xbm.errors import InputError
from xbm_app.data import tar_shards
from xbm_app.data.decoding import decode, quick
from xbm_app.data.images import EncodedSet
from xbm_app.data.own_images import Columns
from xbm_app.data.store import open_store, prepare
from xbm_app.data.tar_shards import read_shards
from xbm_app.data.transforms import resized


def labels_of(images):
    return [images.class_names[label] for label in images.labels]


def pixels_of(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def test_images_of_named_shards_are_read_with_their_classes(tmp_path):
    write_shard(tmp_path / "train-000.tar", ["cat", "dog", "cat"], kind="jpg")
    write_shard(tmp_path / "train-001.tar", ["dog", "cow"], first=3, kind="ppm")
    write_shard(tmp_path / "test-000.tar", ["hen", "hen", "owl", "owl"], first=5)
    dataset = read_shards(tmp_path)
    train, (protocol,) = dataset.train, dataset.protocols
    assert isinstance(train, EncodedSet) and protocol.gallery is None
    assert labels_of(train) == ["cat", "dog", "cat", "dog", "cow"] and train.shards().tolist() == [1, 1, 1, 2, 2]
    assert train.paths[3] == "train-001.tar/0003.ppm" and labels_of(protocol.query) == ["hen", "hen", "owl", "owl"]
    for index, kind in enumerate(["jpg", "jpg", "jpg", "ppm", "ppm"]):
        expected = pixels_of(picture(index, kind=kind))
        assert np.array_equal(np.asarray(train.open(index)), expected)
        assert np.array_equal(resized(train, 16, "square", index), expected)
    assert np.array_equal(np.asarray(protocol.query.take(np.array([2])).open(0)), pixels_of(picture(7)))


@pytest.mark.parametrize("sampling", [0, 1, 2])
def test_a_quick_decoder_gives_the_bits_of_the_slow_one_or_nothing(sampling):
    for side, quality, progressive in ((16, 50, False), (33, 75, True), (47, 90, False), (64, 100, True)):
        pixels = np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        how = {"quality": quality, "subsampling": sampling, "progressive": progressive}
        Image.fromarray(pixels).resize((8, 8)).resize((side, side)).save(buffer, "JPEG", **how)
        content = buffer.getvalue()
        assert np.array_equal(quick(content, side), np.asarray(decode(io.BytesIO(content))))
        assert quick(content, side + 1) is None and quick(content[:-20], side) is None


def test_a_quick_decoder_leaves_alone_what_is_not_plain():
    turned, image = Image.Exif(), Image.new("RGB", (16, 16), (200, 10, 10))
    turned[0x0112] = 6
    for how in ({"exif": turned}, {"format": "PNG"}):
        buffer = io.BytesIO()
        image.save(buffer, **{"format": "JPEG", **how})
        assert quick(buffer.getvalue(), 16) is None
    for mode in ("L", "CMYK"):
        buffer = io.BytesIO()
        image.convert(mode).save(buffer, "JPEG")
        assert quick(buffer.getvalue(), 16) is None
    assert quick(picture(0, kind="ppm") + b"more", 16) is None and quick(b"P6 16 16 65535\n", 16) is None
    assert quick(b"\xff\xd8\xff", 16) is None


def test_without_names_the_classes_are_split_and_a_single_file_will_do(tmp_path):
    file = write_shard(tmp_path / "all.tar", [number % 7 for number in range(21)])
    dataset = read_shards(file, seed=3)
    train, test = dataset.train, dataset.protocols[0].query
    assert len(train) + len(test) == 21 and not set(labels_of(train)) & set(labels_of(test))
    assert dataset.name == "all" and test.num_classes == 4


def test_labels_and_cameras_come_from_json(tmp_path):
    write_shard(tmp_path / "train-0.tar", [1, 1, 2, 2], cameras=["", "", "", ""])
    for part in ("query", "gallery"):
        write_shard(tmp_path / f"{part}-0.tar", [5, 6, 5, 6], cameras=["north", "north", "south", "south"])
    (protocol,) = read_shards(tmp_path, columns=Columns("other", group="camera")).protocols
    assert protocol.name == "re-identification" and labels_of(protocol.query) == ["x5", "x6", "x5", "x6"]
    assert protocol.gallery.groups.tolist() == protocol.query.groups.tolist() == [0, 0, 1, 1]
    with pytest.raises(InputError, match="no test image has a place"):
        read_shards(tmp_path, columns=Columns("other", group="place"))


def test_headers_are_read_once_and_those_of_a_changed_shard_again(tmp_path):
    for shard in range(3):
        write_shard(tmp_path / f"{shard}.tar", range(5), first=5 * shard)
    first = read_shards(tmp_path)
    with patch.object(tar_shards, "_scanned", wraps=tar_shards._scanned) as scanned:
        again = read_shards(tmp_path)
        assert not scanned.called and again.train.paths == first.train.paths
        assert all(again.train.bytes_of(k) == first.train.bytes_of(k) for k in range(len(first.train)))
        write_shard(tmp_path / "1.tar", [0, 1, 2, 3, 4, 4], first=5)
        changed = read_shards(tmp_path)
        assert [call.args[0].name for call in scanned.call_args_list] == ["1.tar"]
        assert sum(len(images) for images in (changed.train, changed.protocols[0].query)) == 16
        (tmp_path / "0.tar").unlink()
        assert len(read_shards(tmp_path).train) + len(read_shards(tmp_path).protocols[0].query) == 11
        (tmp_path / tar_shards.INDEX).write_bytes(b"damaged")
        read_shards(tmp_path)
        assert scanned.call_count == 3
        read_shards(tmp_path / "1.tar", columns=Columns())
    changed.train.rows[0] = 0


def test_a_store_is_made_of_shards_and_noticed_when_they_change(tmp_path):
    file = write_shard(tmp_path / "all.tar", [number % 5 for number in range(15)], kind="ppm")
    train = read_shards(file).train
    store = open_store(prepare(train, tmp_path / "store", 16, quiet=True), train)
    assert np.array_equal(store.view(4), np.asarray(train.open(4)))
    write_shard(file, [number % 5 for number in range(15)], kind="png")
    with pytest.raises(InputError):
        open_store(tmp_path / "store", read_shards(file).train)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"a.jpg": picture(0), "b.jpg": picture(1)}, "a has no label: add a .cls file"),
        ({"a.jpg": picture(0), "a.json": b"[1"}, "its .cls or .json file cannot be read"),
        ({"a.jpg": picture(0), "a.json": b"{}"}, "a has no label"),
        ({"a.txt": b"words"}, "hold no images"),
        ({"a.jpg": picture(0), "a.cls": b"1", "b.cls": b"2", "a.png": picture(0), "c.cls": b"2"}, "a has no label"),
    ],
)
def test_a_shard_without_images_or_labels_is_refused(tmp_path, files, text):
    write_tar(tmp_path / "a.tar", files)
    with pytest.raises(InputError) as caught:
        read_shards(tmp_path)
    assert text in str(caught.value)


def test_other_files_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(InputError, match="holds no tar shards"):
        read_shards(tmp_path)
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("0.jpg"))
    with pytest.raises(InputError, match="cannot be read as an uncompressed tar file"):
        read_shards(tmp_path)
    (tmp_path / "packed.tar").unlink()
    write_shard(tmp_path / "train-0.tar", [1, 2])
    write_shard(tmp_path / "val-0.tar", [1, 2], first=2)
    with pytest.raises(InputError, match="say train, val; name them"):
        read_shards(tmp_path)
    write_tar(tmp_path / "sub" / "0.tar", {"0.jpg": b"no image", "0.json": json.dumps({"label": 7}).encode()})
    write_shard(tmp_path / "sub" / "1.tar", range(7), first=1)
    images = read_shards(tmp_path / "sub")
    both = (images.train, images.protocols[0].query)
    broken = next((part, part.paths.index("0.tar/0.jpg")) for part in both if "0.tar/0.jpg" in part.paths)
    with pytest.raises(InputError, match=r"0\.tar/0\.jpg cannot be read as an image"):
        broken[0].open(broken[1])
