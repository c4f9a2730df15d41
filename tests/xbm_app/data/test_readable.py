import numpy as np
import pytest
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.images import ImageSet
from xbm_app.data.readable import readable


@pytest.fixture
def images(tmp_path):
    for k in range(7):
        Image.new("RGB", (4 + k, 4)).save(tmp_path / f"{k}.png")
    (tmp_path / "2.png").write_bytes(b"no picture")
    (tmp_path / "6.png").unlink()
    return ImageSet("x", np.zeros(7, np.int64), ["x"], root=tmp_path, paths=[f"{k}.png" for k in range(7)])


def test_what_can_be_read_and_what_cannot_by_index_a_batch_at_a_time(images):
    batches = list(readable(images, lambda image: image.width, at_least=1, at_once=3, quiet=True))
    assert [made for made, _ in batches] == [{0: 4, 1: 5}, {3: 7, 4: 8, 5: 9}, {}]
    assert [list(failed) for _, failed in batches] == [[2], [], [6]]
    assert "2.png cannot be read as an image" in str(batches[0][1][2])


def test_what_cannot_be_made_is_told_too_and_a_defect_is_not_hidden(images):
    def narrow(image):
        if image.width > 8:
            raise InputError("too wide")
        return image.width

    (_, failed), *_ = readable(images, narrow, at_least=1, at_once=7, quiet=True)
    assert list(failed) == [2, 5, 6] and str(failed[5]) == "too wide"
    with pytest.raises(ZeroDivisionError):
        list(readable(images, lambda image: 1 / 0, at_least=1, at_once=7, quiet=True))
