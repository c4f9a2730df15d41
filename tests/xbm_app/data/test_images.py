"""Image sets: what they open, refuse and select; the rows that they are built from; the files that they are written to."""

import os
import warnings

import numpy as np
import pytest
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.decoding import decode
from xbm_app.data.images import (
    ImageSet,
    Row,
    folder_name,
    image_files,
    inside,
    readable,
    refuse_two_labels,
    write_pictures,
)


@pytest.fixture
def images(tmp_path):
    for k, size in enumerate([(20, 10), (10, 20), (12, 12)]):
        Image.new("RGB", size, (k, 2 * k, 3 * k)).save(tmp_path / f"{k}.png")
    return ImageSet("three", np.array([4, 2, 4]), list("abcde"), root=tmp_path, paths=["0.png", "1.png", "2.png"])


def test_images_come_as_rgb_and_cut_to_their_box(images):
    assert images.open(0).size == (20, 10) and images.open(1).getpixel((0, 0)) == (1, 2, 3)
    boxed = ImageSet("boxed", images.labels, images.class_names, images.root, images.paths, boxes=np.array([[2, 3, 9, 7]] * 3))
    assert boxed.open(0).size == (7, 4)


def test_a_photograph_taken_sideways_stands_upright(images, tmp_path):
    sideways = Image.new("RGB", (30, 10))
    exif = sideways.getexif()
    exif[0x0112] = 6
    sideways.save(tmp_path / "0.png", exif=exif)
    assert images.open(0).size == (10, 30)


def test_a_selection_renumbers_classes_in_their_old_order(images):
    some = images.select(np.array([2, 1]), "two")
    assert some.labels.tolist() == [1, 0] and some.class_names == ["c", "e"] and some.paths == ["2.png", "1.png"]
    assert some.name == "two" and len(some) == 2 and some.num_classes == 2


def test_missing_and_broken_files_are_named(images, tmp_path):
    (tmp_path / "0.png").unlink()
    (tmp_path / "1.png").write_text("not an image")
    with pytest.raises(InputError, match=r"0\.png is missing"):
        images.open(0)
    with pytest.raises(InputError, match=r"1\.png cannot be read as an image"):
        images.open(1)


def test_labels_and_images_must_be_as_many():
    with pytest.raises(InputError, match="2 images but 3 labels"):
        ImageSet("odd", np.arange(3), list("abc"), pixels=np.zeros((2, 4, 4), np.uint8))


def test_made_images_are_described_by_class_and_position():
    made = ImageSet("made", np.array([0, 1]), ["a", "b"], pixels=np.zeros((2, 4, 4), np.uint8))
    assert made.describe(1) == "b/1" and made.open(0).mode == "RGB"


@pytest.fixture
def damaged(tmp_path):
    for k in range(7):
        Image.new("RGB", (4 + k, 4)).save(tmp_path / f"{k}.png")
    (tmp_path / "2.png").write_bytes(b"no picture")
    (tmp_path / "6.png").unlink()
    return ImageSet("x", np.zeros(7, np.int64), ["x"], root=tmp_path, paths=[f"{k}.png" for k in range(7)])


def test_what_can_be_read_and_what_cannot_by_index_a_batch_at_a_time(damaged):
    batches = list(readable(damaged, lambda image: image.width, at_least=1, at_once=3, quiet=True))
    assert [made for made, _ in batches] == [{0: 4, 1: 5}, {3: 7, 4: 8, 5: 9}, {}]
    assert [list(failed) for _, failed in batches] == [[2], [], [6]]
    assert "2.png cannot be read as an image" in str(batches[0][1][2])


def test_what_cannot_be_made_is_told_too_and_a_defect_is_not_hidden(damaged):
    def narrow(image):
        if image.width > 8:
            raise InputError("too wide")
        return image.width

    (_, failed), *_ = readable(damaged, narrow, at_least=1, at_once=7, quiet=True)
    assert list(failed) == [2, 5, 6] and str(failed[5]) == "too wide"
    with pytest.raises(ZeroDivisionError):
        list(readable(damaged, lambda image: 1 / 0, at_least=1, at_once=7, quiet=True))


@pytest.mark.parametrize(
    "path",
    ["../x.jpg", "a/../../x.jpg", "a/..", "/etc/x.jpg", "C:/x.jpg", "c:x.jpg", "a\\x.jpg", "", "a\0.jpg"],
)
def test_paths_that_could_leave_the_root_are_refused_with_their_place(path):
    with pytest.raises(InputError, match=r"^list.txt, line 7: "):
        inside(path, "list.txt, line 7")


@pytest.mark.parametrize(("path", "short"), [("./a//b.jpg", "a/b.jpg"), ("..a/b..jpg", "..a/b..jpg"), ("a b.jpg", "a b.jpg")])
def test_paths_inside_the_root_take_their_shortest_form(path, short):
    assert inside(path, "list.txt, line 7") == short


def test_one_image_with_two_labels_names_both_places_unless_the_boxes_differ():
    first, second = Row("1.jpg", "a", "line 1", (0, 0, 9, 9)), Row("1.jpg", "b", "line 2", (9, 0, 20, 9))
    refuse_two_labels([first, second])
    with pytest.raises(InputError, match=r"line 3: 1.jpg has label 'b' here and 'a' in line 1"):
        refuse_two_labels([first, Row("1.jpg", "b", "line 3", (0, 0, 9, 9))])


def test_every_image_becomes_a_file_in_the_folder_of_its_class(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 6), dtype=np.uint8)
    images = ImageSet("made", np.array([1, 0, 1, 1, 0]), ["U+002F /", "U+0416 Ж"], pixels=pixels)
    assert write_pictures(images, tmp_path / "new") == tmp_path / "new"
    written = {path.relative_to(tmp_path / "new").as_posix(): np.asarray(Image.open(path)) for path in tmp_path.rglob("*.png")}
    order = {"U+0416_Ж/0.png": 0, "U+002F/0.png": 1, "U+0416_Ж/1.png": 2, "U+0416_Ж/2.png": 3, "U+002F/1.png": 4}
    assert written.keys() == order.keys()
    assert all(np.array_equal(written[path], pixels[k]) for path, k in order.items())


def test_no_name_leads_out_of_the_folder():
    assert [folder_name(name) for name in ("../x", "a/b", "..", "U+005C \\")] == ["x", "ab", "", "U+005C"]


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path):
    picture = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert("P")
    picture.save(tmp_path / "icon.png", transparency=bytes(range(64)))
    with warnings.catch_warnings(action="error"):
        read = decode(tmp_path / "icon.png")
    with Image.open(tmp_path / "icon.png") as file, warnings.catch_warnings(action="ignore"):
        assert read.mode == "RGB" and np.array_equal(np.asarray(read), np.asarray(file.convert("RGB")))


RAMP = np.linspace(0, 1, 48).reshape(6, 8)


@pytest.mark.parametrize(
    ("name", "gray"),
    [
        ("a.png", Image.fromarray((RAMP * 65535).astype(np.uint16))),
        ("a.tif", Image.fromarray((RAMP * 65535).astype(np.uint16))),
        ("b.tif", Image.fromarray((RAMP * 65535).astype(np.int32))),
        ("c.tif", Image.fromarray(RAMP.astype(np.float32))),
    ],
)
def test_deep_gray_values_are_scaled_by_their_range(tmp_path, name, gray):
    gray.save(tmp_path / name)
    pixels = np.asarray(decode(tmp_path / name))
    assert pixels.shape == (6, 8, 3) and (np.abs(pixels - 255 * RAMP[..., None]) <= 0.51).all()


@pytest.mark.parametrize("values", [255 * RAMP, RAMP - 0.5, RAMP * np.nan, 1e9 * RAMP.astype(np.int32) - 5])
def test_gray_values_without_a_known_range_are_unreadable(tmp_path, values):
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "a.tif")
    images = ImageSet("one", np.zeros(1, int), ["a"], root=tmp_path, paths=["a.tif"])
    with pytest.raises(InputError, match=r"a\.tif cannot be read as an image .*8 bits"):
        images.open(0)


def test_a_box_beyond_the_picture_is_cut_to_it_and_one_outside_is_refused(images):
    boxes = np.array([[5, 5, 99_999, 99_999], [0, 0, 10**9, 10**9], [12, 0, 15, 5]])
    boxed = ImageSet("boxed", images.labels, images.class_names, images.root, images.paths, boxes=boxes)
    assert boxed.open(0).size == (15, 5) and boxed.open(1).size == (10, 20)
    with pytest.raises(InputError, match=r"2\.png: the box 12, 0, 15, 5 lies outside the picture"):
        boxed.open(2)


def test_a_pipe_named_as_an_image_is_not_waited_for(images, tmp_path):
    (tmp_path / "0.png").unlink()
    os.mkfifo(tmp_path / "0.png")
    with pytest.raises(InputError, match="not a regular file"):
        images.open(0)


def test_a_folder_that_cannot_be_listed_and_a_name_that_is_not_utf8_are_told(images, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "9.png").touch()
    (tmp_path / os.fsdecode(b"caf\xe9.png")).touch()
    honest = os.scandir

    def scandir(folder):
        if str(folder).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(folder))
        return honest(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    told = []
    assert image_files(tmp_path, told.append) == ["0.png", "1.png", "2.png"]
    assert ["cannot be listed" in str(each) for each in told] == [False, True]
    for message in ("not UTF-8", "cannot be listed"):
        with pytest.raises(InputError, match=message):
            image_files(tmp_path)
        (tmp_path / os.fsdecode(b"caf\xe9.png")).unlink(missing_ok=True)
