"""How an image file is decoded and resized: all images are read through this file."""

import os
import re
import stat
import struct
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps
from PIL.ImageFile import ImageFile

from xbm.errors import InputError

INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
PPM = re.compile(rb"P6\s(\d{1,5})\s(\d{1,5})\s255\s")  # the header of a file without comments
LONGEST = 4  # the largest aspect ratio of a resized image
# What Pillow raises for damaged files. All but the first four are rare, but a single one would end hours of work.
UNREADABLE = (
    OSError, ValueError, SyntaxError, Image.DecompressionBombError,
    TypeError, LookupError, ArithmeticError, AttributeError, EOFError, struct.error,
)  # fmt: skip


def decode(
    source: Path | IO[bytes],
    at_least: int | None = None,
    formats: tuple[str, ...] | None = None,
    most_pixels: int | None = None,
) -> Image.Image:
    """Decodes an image as RGB, upright. All images are read through this function.

    Args:
        at_least: allows a JPEG to be decoded at 1/2, 1/4 or 1/8 of its size, with no side below this many pixels.
        formats: the formats to try; None means all formats that Pillow supports.
        most_pixels: larger images are refused with an `InputError` before they are decompressed.
    """
    with open_image(source, formats) as file:
        width, height = file.size
        if most_pixels is not None and width * height > most_pixels:
            limit = most_pixels // 1_000_000
            raise InputError(f"the picture has {width:,} × {height:,} pixels: give one of at most {limit} million")
        if at_least is not None:
            file.draft(None, (at_least, at_least))
        ImageOps.exif_transpose(file, in_place=True)
        file.load()
        image = eight_bits(file)
        if image.mode == "P" and "transparency" in image.info:  # the same colors, without Pillow's warning
            image = image.convert("RGBA")
        return image if image.mode == "RGB" else image.convert("RGB")  # a copy would hold up the other threads


def quick(content: bytes, size: int) -> np.ndarray | None:
    """Decodes a small image that has its size already, with the bits of `decode` in a third of the time.

    Returns:
        (size, size, 3) uint8 for an uncompressed PPM, or for a JPEG of this size in color, without an orientation; None for
        all others and for damaged ones, which are for `decode`.
    """
    if content.startswith(b"P6"):
        header = PPM.match(content)
        if header is None or (int(header[1]), int(header[2])) != (size, size) or len(content) != header.end() + 3 * size**2:
            return None
        return np.frombuffer(content, np.uint8, offset=header.end()).reshape(size, size, 3)
    if not content.startswith(b"\xff\xd8") or _jpeg_shape(content) != (size, size):
        return None
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    try:
        pixels = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB)
    except RuntimeError:
        return None
    return pixels.permute(1, 2, 0).numpy()


def _jpeg_shape(content: bytes) -> tuple[int, int] | None:
    """The height and width of a JPEG of three channels; None if it has metadata that could change what is shown."""
    place = 2
    while place + 10 <= len(content) and content[place] == 0xFF:
        marker, length = content[place + 1], int.from_bytes(content[place + 2 : place + 4])
        if marker in (0xC0, 0xC1, 0xC2):  # the start of a frame: baseline, extended, progressive
            height, width = int.from_bytes(content[place + 5 : place + 7]), int.from_bytes(content[place + 7 : place + 9])
            return (height, width) if content[place + 4] == 8 and content[place + 9] == 3 else None
        if marker in (0xE1, 0xEE):  # Exif, which may say how it is turned, and Adobe, which may say other colors
            return None
        place += 2 + length
    return None


def open_image(source: Path | IO[bytes], formats: tuple[str, ...] | None = None) -> ImageFile:
    """Opens an image without decoding it. Opening what is not a file, such as a pipe, could wait forever."""
    if isinstance(source, Path) and not stat.S_ISREG(os.stat(source).st_mode):
        raise OSError("it is not a regular file")
    return Image.open(source, formats=formats)


def eight_bits(image: Image.Image) -> Image.Image:
    """Converts gray values of 16 bits, or floats from 0 to 1, to 8 bits; Pillow would clip them to white or black.

    Raises:
        ValueError: the values have no range that can be known.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image)
    highest = 1.0 if image.mode == "F" else 65_535.0
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= highest):
        raise ValueError(f"gray values outside 0 to {highest:g}: save it with 8 bits per channel")
    return Image.fromarray((values * (255 / highest)).round().astype(np.uint8))


def fit(image: Image.Image, size: int, mode: str, interpolation: str = "bilinear") -> np.ndarray:
    """Resizes an image.  # (h, w, 3) uint8

    "square" resizes to size × size. "shorter" keeps the aspect ratio and resizes the shorter side to `size`; an image more than
    four times as long as wide is first cropped to its center, since otherwise a narrow strip could take gigabytes.
    """
    width, height = image.size
    if mode == "square":
        shape = (size, size)
    else:
        long = min(max(width, height), LONGEST * min(width, height))
        if long < max(width, height):
            left, top = max(0, (width - long) // 2), max(0, (height - long) // 2)
            image = image.crop((left, top, min(width, left + long), min(height, top + long)))
            width, height = image.size
        shape = (size, size * height // width) if width <= height else (size * width // height, size)
    if image.size != shape:
        image = image.resize(shape, INTERPOLATIONS[interpolation])
    return np.asarray(image)
