import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.check import Problem, check_dataset, report, skip_problems
from xbm_app.data.images import Dataset, ImageSet, Protocol, parts


def images(name: str, root: Path, labels: list[int], size=(31, 23), **more) -> ImageSet:
    paths = [f"{name.split()[-1]}/{index}.jpg" for index in range(len(labels))]
    for index, path in enumerate(paths):
        (root / path).parent.mkdir(exist_ok=True)
        pixels = np.random.default_rng([*name.encode(), index]).integers(0, 256, (size[1], size[0], 3), np.uint8)
        Image.fromarray(pixels).save(root / path)
    names = [f"{name}-{k}" for k in range(max(labels) + 1)]
    return ImageSet(name, np.array(labels), names, root, paths, **more)


@pytest.fixture
def dataset(tmp_path):
    train = images("mine train", tmp_path, [0, 0, 0, 1, 1, 2, 2])
    test = images("mine test", tmp_path, [0, 0, 1, 1, 1])
    return Dataset("mine", train, (Protocol("test", test, (1,)),))


def found(dataset):
    return [(p.kind, p.part, p.index) for p in check_dataset(dataset, quiet=True)]


def test_a_sound_data_set_has_no_problems_and_is_left_alone(dataset):
    assert check_dataset(dataset, quiet=True) == []
    same = skip_problems(dataset, [])
    assert same.train is dataset.train and same.protocols[0].query is dataset.protocols[0].query


def test_missing_truncated_foreign_and_tiny_images_are_told_apart(dataset, tmp_path):
    (tmp_path / "train/0.jpg").unlink()
    whole = (tmp_path / "train/1.jpg").read_bytes()
    (tmp_path / "train/1.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "test/3.jpg").write_text("<html>not found</html>")
    Image.new("RGB", (200, 15)).save(tmp_path / "train/4.jpg")
    Image.new("RGB", (200, 16)).save(tmp_path / "train/5.jpg")
    assert found(dataset) == [
        ("missing", "mine train", 0),
        ("unreadable", "mine train", 1),
        ("tiny", "mine train", 4),
        ("unreadable", "mine test", 3),
        ("single", "mine train", 2),  # 0 and 1 of its class are broken
        ("single", "mine train", 3),
    ]


def test_the_same_bytes_in_training_and_testing_are_found_and_leave_training(dataset, tmp_path):
    shutil.copy(tmp_path / "test/4.jpg", tmp_path / "train/2.jpg")
    shutil.copy(tmp_path / "train/5.jpg", tmp_path / "train/6.jpg")  # within training is no leak
    problems = check_dataset(dataset, quiet=True)
    assert [(p.kind, p.index, p.text) for p in problems] == [("duplicate", 2, "train/2.jpg = test/4.jpg")]
    kept = skip_problems(dataset, problems)
    assert len(kept.train) == 6 and len(kept.protocols[0].query) == 5


def test_files_of_equal_size_with_other_bytes_are_no_duplicates(dataset, tmp_path):
    for path, value in (("train/0.png", 3), ("test/0.png", 4)):
        Image.new("L", (40, 40), value).save(tmp_path / path)
    assert (tmp_path / "train/0.png").stat().st_size == (tmp_path / "test/0.png").stat().st_size
    train = replace(dataset.train, paths=["train/0.png", *dataset.train.paths[1:]])
    test = replace(dataset.protocols[0].query, paths=["test/0.png", *dataset.protocols[0].query.paths[1:]])
    assert found(Dataset("mine", train, (Protocol("test", test, (1,)),))) == []


def test_skipping_leaves_dense_training_labels_and_classes_of_two_or_more(dataset, tmp_path):
    (tmp_path / "train/3.jpg").unlink()  # class 1 has one image left
    (tmp_path / "test/0.jpg").unlink()
    kept = skip_problems(dataset, check_dataset(dataset, quiet=True))
    assert kept.train.paths == ["train/0.jpg", "train/1.jpg", "train/2.jpg", "train/5.jpg", "train/6.jpg"]
    assert kept.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert list(kept.train.class_names) == ["mine train-0", "mine train-2"]
    assert kept.protocols[0].query.paths == ["test/1.jpg", "test/2.jpg", "test/3.jpg", "test/4.jpg"]
    left = check_dataset(kept, quiet=True)
    assert [p.kind for p in left] == ["unmatched"]  # test/1.jpg lost its only partner; it is kept, to be found by mistake


def test_query_and_gallery_keep_their_shared_numbering_when_some_are_skipped(dataset, tmp_path):
    query, gallery = images("mine query", tmp_path, [0, 1, 2]), images("mine gallery", tmp_path, [0, 1, 1, 2])
    (tmp_path / "query/0.jpg").unlink()
    (tmp_path / "gallery/3.jpg").unlink()
    both = Dataset("mine", dataset.train, (Protocol("query/gallery", query, (1,), gallery=gallery),))
    (protocol,) = skip_problems(both, check_dataset(both, quiet=True)).protocols
    assert protocol.query.labels.tolist() == [1, 2]
    assert protocol.gallery.labels.tolist() == [0, 1, 1]


def test_testing_keeps_whatever_can_be_opened(dataset, tmp_path):
    for path in ("train/0.jpg", "test/0.jpg"):
        Image.new("RGB", (200, 9), (20 * len(path), 0, 0)).save(tmp_path / path)
    problems = check_dataset(dataset, quiet=True)
    assert [(p.kind, p.part) for p in problems] == [("tiny", "mine train"), ("tiny", "mine test")]
    kept = skip_problems(dataset, problems)
    assert len(kept.train) == 6 and len(kept.protocols[0].query) == 5


def test_a_query_without_anything_to_find_is_reported(dataset, tmp_path):
    query, gallery = images("mine query", tmp_path, [0, 1, 2]), images("mine gallery", tmp_path, [0, 2])
    both = Dataset("mine", dataset.train, (Protocol("query/gallery", query, (1,), gallery=gallery),))
    assert found(both) == [("unmatched", "mine query", 1)]


def test_boxes_are_held_against_their_picture(dataset, tmp_path):
    # pictures of 31 × 23
    boxes = np.array([[0, 0, 31, 23], [20, 0, 40, 23], [40, 0, 60, 20], [5, 5, 5, 23], [10, 2, 30, 22]] + [[0, 0, 31, 23]] * 2)
    boxed = replace(dataset, train=replace(dataset.train, boxes=boxes))
    assert [problem[:1] + problem[2:] for problem in found(boxed)] == [
        ("tiny", 1),
        ("unreadable", 2),
        ("unreadable", 3),
        ("single", 0),
        ("single", 4),
    ]


def test_a_picture_that_is_stored_on_its_side_is_measured_upright(dataset, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 90)).save(tmp_path / "train/0.jpg", exif=exif)
    boxes = np.array([[50, 0, 90, 40]] + [[0, 0, 31, 23]] * 6)
    assert found(replace(dataset, train=replace(dataset.train, boxes=boxes))) == []


def test_a_set_that_two_protocols_share_is_reported_once_and_stays_shared(dataset, tmp_path):
    query = dataset.protocols[0].query
    twice = replace(dataset, protocols=(Protocol("a", query, (1,)), Protocol("b", query, (1,), one_per_class=10)))
    (tmp_path / "test/0.jpg").unlink()
    problems = check_dataset(twice, quiet=True)
    assert [(p.kind, p.index) for p in problems] == [("missing", 0)]
    kept = skip_problems(twice, problems)
    assert kept.protocols[0].query is kept.protocols[1].query and len(kept.protocols[0].query) == 4
    assert list(parts(kept)) == ["train", "test"]


def test_sets_that_live_in_memory_are_checked_for_classes_of_one(tmp_path):
    pixels = np.zeros((3, 8, 8), np.uint8)
    train = ImageSet("glyphs train", np.array([0, 0, 1]), ["a", "b"], pixels=pixels)
    test = ImageSet("glyphs test", np.array([0, 0, 1]), ["c", "d"], pixels=pixels)
    made = Dataset("glyphs", train, (Protocol("test", test, (1,)),))
    assert found(made) == [("single", "glyphs train", 2), ("unmatched", "glyphs test", 2)]
    assert len(skip_problems(made, check_dataset(made, quiet=True)).train) == 2


def test_nothing_left_is_an_error(dataset, tmp_path):
    shutil.rmtree(tmp_path / "test")
    with pytest.raises(InputError, match="mine test: no image is left"):
        skip_problems(dataset, check_dataset(dataset, quiet=True))


def test_the_report_names_twenty_and_counts_the_rest():
    problems = [Problem("missing", "mine train", n, f"train/{n}.jpg") for n in range(23)]
    problems += [Problem("missing", "mine test", 0, "train/0.jpg")]  # one file, two sets: told once
    lines = report(problems).splitlines()
    assert lines[0] == "23 images not there:"
    assert lines[1] == "  train/0.jpg" and lines[20] == "  train/19.jpg"
    assert lines[21] == "  ... and 3 more" and len(lines) == 22
