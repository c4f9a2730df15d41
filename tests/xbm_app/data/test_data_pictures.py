import doctest

import numpy as np
from PIL import Image

from xbm_app.data import pictures
from xbm_app.data.images import ImageSet
from xbm_app.data.pictures import folder_name, write_pictures


def test_every_image_becomes_a_file_in_the_folder_of_its_class(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 6), dtype=np.uint8)
    images = ImageSet("made", np.array([1, 0, 1, 1, 0]), ["U+002F /", "U+0416 Ж"], pixels=pixels)
    assert write_pictures(images, tmp_path / "new") == tmp_path / "new"
    found = {path.relative_to(tmp_path / "new").as_posix(): np.asarray(Image.open(path)) for path in tmp_path.rglob("*.png")}
    order = {"U+0416_Ж/0.png": 0, "U+002F/0.png": 1, "U+0416_Ж/1.png": 2, "U+0416_Ж/2.png": 3, "U+002F/1.png": 4}
    assert found.keys() == order.keys()
    assert all(np.array_equal(found[path], pixels[k]) for path, k in order.items())


def test_no_name_leads_out_of_the_folder():
    assert [folder_name(name) for name in ("../x", "a/b", "..", "U+005C \\")] == ["x", "ab", "", "U+005C"]


def test_the_examples_run():
    assert doctest.testmod(pictures).failed == 0
