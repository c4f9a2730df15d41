"""Image sets: what they open, refuse and select."""

import numpy as np
import pytest
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.images import ImageSet


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
