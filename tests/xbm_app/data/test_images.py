"""Image sets: what they open, refuse and select; the rows that they are built from; the files that they are written to."""

import numpy as np
import pytest
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.images import ImageSet, Row, folder_name, inside, readable, refuse_two_labels, write_pictures


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
