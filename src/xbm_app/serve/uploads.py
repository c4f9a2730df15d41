"""Uploads: their limits and formats, and how an untrusted file is opened as an image."""

import io

from PIL import Image, UnidentifiedImageError
from starlette.exceptions import HTTPException

from xbm.errors import InputError
from xbm_app.data.images import UNREADABLE, decode

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # what browsers show; the file name and declared type are ignored
MOST_BYTES = 20_000_000
MOST_PIXELS = 50_000_000
ENVELOPE = 65_536  # bytes of a request besides the file, for multipart
TOO_LARGE = f"the file is larger than {MOST_BYTES // 1_000_000} MB: use a smaller one"


def open_upload(content: bytes, at_least: int) -> Image.Image:
    """The image in an upload, decoded like the indexed images, no side below `at_least` pixels.

    Raises:
        HTTPException: 415 if it is not an image, 413 if it has too many pixels, 422 if it is damaged.
    """
    try:
        return decode(io.BytesIO(content), at_least, FORMATS, MOST_PIXELS)
    except Image.DecompressionBombError:
        limit = MOST_PIXELS // 1_000_000
        raise HTTPException(413, f"the picture has far too many pixels: use one of at most {limit} million") from None
    except UnidentifiedImageError:
        kinds = "JPEG, PNG, WebP, GIF or BMP"
        raise HTTPException(415, f"the file is not an image that can be read: use a {kinds}") from None
    except InputError as error:
        raise HTTPException(413, str(error)) from None
    except UNREADABLE:
        raise HTTPException(422, "the image is damaged or incomplete") from None
