import io
import struct

import pytest
from PIL import Image
from starlette.exceptions import HTTPException

from tests.xbm_app.serve.bombs import png_of_zeros
from xbm_app.serve.uploads import FORMATS, open_upload


def file(kind, size=(40, 30), **options):
    target = io.BytesIO()
    Image.effect_noise(size, 90).convert("RGB").save(target, kind, **options)
    return target.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_usual_kinds_are_opened(kind):
    image = open_upload(file(kind), 16)
    assert (image.mode, image.size) == ("RGB", (40, 30))


def test_a_photograph_is_turned_upright_and_decoded_no_larger_than_needed():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = open_upload(file("JPEG", (800, 400), exif=exif), 32)
    assert image.width < image.height and max(image.size) < 800


def refused(content):
    with pytest.raises(HTTPException) as caught:
        open_upload(content, 16)
    return caught.value.status_code, caught.value.detail


@pytest.mark.parametrize("content", [b"", b"Dear Sir", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x00" * 999])
def test_what_is_no_image_is_refused_whatever_its_name(content):
    status, told = refused(content)
    assert status == 415 and "not an image" in told


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("side", "words"), [(10_000, "10,000 × 10,000 pixels"), (30_000, "far too many pixels")])
def test_a_bomb_is_refused_before_it_is_unpacked(side, words):
    content = png_of_zeros(side, side, rows=10)  # nothing to unpack: only the header can have told
    status, told = refused(content)
    assert status == 413 and words in told and "50 million" in told


def test_a_file_that_is_cut_short_is_damaged():
    assert refused(file("PNG", (300, 300))[:4000])[0] == 422
    assert refused(file("JPEG", (300, 300))[:3000])[0] == 422
    content = bytearray(file("BMP"))
    content[18:26] = struct.pack("<ii", 40, 4000)
    assert refused(bytes(content))[0] == 422
