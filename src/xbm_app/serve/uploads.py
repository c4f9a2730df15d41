"""Uploads: bytes from a stranger, opened as an image only if they are one of a few kinds and of a sane size."""

import io

from PIL import Image, UnidentifiedImageError
from starlette.exceptions import HTTPException

from xbm.errors import InputError
from xbm_app.data.images import UNREADABLE, decode

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # what browsers show; whatever the sender says it is
MOST_PIXELS = 50_000_000


def open_upload(content: bytes, at_least: int) -> Image.Image:
    """The image in an upload, decoded as indexed images are.

    Raises:
        HTTPException: 415 if it is none, 413 if it would unpack to too many pixels, 422 if it is damaged.
    """
    try:
        return decode(io.BytesIO(content), at_least, FORMATS, MOST_PIXELS)
    except Image.DecompressionBombError:
        limit = MOST_PIXELS // 1_000_000
        raise HTTPException(413, f"the picture has far too many pixels: give one of at most {limit} million") from None
    except UnidentifiedImageError:
        kinds = "JPEG, PNG, WebP, GIF or BMP"
        raise HTTPException(415, f"the file is not an image that can be read, whatever its name says: give a {kinds}") from None
    except InputError as error:
        raise HTTPException(413, str(error)) from None
    except (*UNREADABLE, MemoryError):
        raise HTTPException(422, "the image is damaged or cut short: save it anew") from None
