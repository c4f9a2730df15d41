"""Sets whose images are encoded bytes inside larger files: tar shards, Parquet files, data sets of Hugging Face."""

import re
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Protocol

import numpy as np
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.decoding import UNREADABLE, decode
from xbm_app.data.images import Dataset, ImageSet

PLAIN = re.compile(rb"P6\s(\d{1,5})\s(\d{1,5})\s255\s")  # the header of a PPM file without comments


class Source(Protocol):
    """Where the bytes of the images are.

    Attributes:
        sizes: (N,) int64, in bytes.
        times: (N,) int64, modification time (ns) of the file that holds each image.
        shards: (N,) int64, the file that holds each image; the images of a file are consecutive.
    """

    @property
    def sizes(self) -> np.ndarray: ...
    @property
    def times(self) -> np.ndarray: ...
    @property
    def shards(self) -> np.ndarray: ...
    def read(self, row: int) -> bytes: ...


@dataclass(frozen=True, eq=False)
class EncodedSet(ImageSet):
    """A set whose image `i` is row `rows[i]` of a source. Its `paths` are names for messages, not files."""

    source: Source | None = None
    rows: np.ndarray | None = None

    def open(self, index: int, at_least: int | None = None) -> Image.Image:
        try:
            image = decode(BytesIO(self.bytes_of(index)), at_least if self.boxes is None else None)
        except UNREADABLE as error:
            reason = str(error).split(" <_io")[0]
            raise InputError(f"{self.describe(index)} cannot be read as an image ({reason}): replace or remove it") from None
        return image

    def bytes_of(self, index: int) -> bytes:
        assert self.source is not None and self.rows is not None
        try:
            return self.source.read(int(self.rows[index]))
        except OSError as error:
            raise InputError(f"{self.describe(index)} cannot be read ({error.strerror}): restore its file") from None

    def plain_pixels(self, index: int, size: int) -> np.ndarray | None:
        """The pixels of an uncompressed image (PPM) of this size, which need no decoding; None for any other.  # (h, w, 3)"""
        content = self.bytes_of(index)
        header = PLAIN.match(content) if content.startswith(b"P6") else None
        if header is None or (int(header[1]), int(header[2])) != (size, size) or len(content) != header.end() + 3 * size**2:
            return None
        return np.frombuffer(content, np.uint8, offset=header.end()).reshape(size, size, 3)

    def sizes(self) -> np.ndarray:
        assert self.source is not None
        return self.source.sizes[self.rows]

    def times(self) -> np.ndarray:
        assert self.source is not None
        return self.source.times[self.rows]

    def shards(self) -> np.ndarray:
        """(N,): the file of the source that holds each image."""
        assert self.source is not None
        return self.source.shards[self.rows]

    def take(self, indices: np.ndarray) -> "EncodedSet":
        assert self.rows is not None
        return replace(super().take(indices), rows=self.rows[indices])  # type: ignore[call-arg, return-value]


def encoded(dataset: Dataset, source: Source, row_of: dict[str, int]) -> Dataset:
    """The same data set with images from `source`, found by their paths."""

    def of(images: ImageSet) -> EncodedSet:
        rows = np.array([row_of[path] for path in images.paths or ()], np.int64)
        return EncodedSet(**{**vars(images), "source": source, "rows": rows})

    protocols = tuple(
        replace(each, query=of(each.query), gallery=None if each.gallery is None else of(each.gallery))
        for each in dataset.protocols
    )
    return Dataset(dataset.name, of(dataset.train), protocols)
