"""Sets of labelled images, and the protocols that score a model on them: what every reader returns."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps

from xbm.errors import InputError

# What Pillow raises for damaged files. Beyond the first four it is rare, but a single one would end hours of work.
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
    """A picture as RGB, upright: the one way from bytes to pixels.

    Args:
        at_least: a JPEG may be decoded at a half, quarter or eighth of its size, no side below that many pixels.
        formats: those that are tried; None means all that Pillow knows.
        most_pixels: refuses, by an `InputError`, a larger picture before any of it is unpacked.
    """
    with Image.open(source, formats=formats) as file:
        width, height = file.size
        if most_pixels is not None and width * height > most_pixels:
            limit = most_pixels // 1_000_000
            raise InputError(f"the picture has {width:,} × {height:,} pixels: give one of at most {limit} million")
        if at_least is not None:
            file.draft(None, (at_least, at_least))
        ImageOps.exif_transpose(file, in_place=True)
        file.load()
        return file if file.mode == "RGB" else file.convert("RGB")  # copies hold up the other threads


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images on disk, or in memory when `pixels` is given.

    The position of an image in its set is its instance id.

    Attributes:
        name: what messages call it, e.g. "cars train".
        labels: (N,) int64, 0 ≤ label < len(class_names).
        class_names: one name a class.
        root: the folder that `paths` are relative to.
        paths: N paths relative to `root`, with forward slashes.
        boxes: (N, 4) int64 left, top, right, bottom: the part of the picture that counts, or None for all of it.
        pixels: (N, H, W) or (N, H, W, 3) uint8, for sets that are made rather than read.
    """

    name: str
    labels: np.ndarray
    class_names: Sequence[str]
    root: Path | None = None
    paths: Sequence[str] | None = None
    boxes: np.ndarray | None = None
    pixels: np.ndarray | None = None

    def __post_init__(self) -> None:
        count = len(self.pixels) if self.pixels is not None else len(self.paths or ())
        if len(self.labels) != count:
            raise InputError(f"{self.name}: {count} images but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def open(self, index: int, at_least: int | None = None) -> Image.Image:
        """The image as RGB, upright, cropped to its box.

        With `at_least`, a JPEG may be decoded at a half, quarter or eighth of its size, no side below that many pixels: much
        faster for photographs that are going to be made small. Images with boxes, which count full pixels, are left alone.
        """
        if self.pixels is not None:
            return Image.fromarray(self.pixels[index]).convert("RGB")
        assert self.root is not None and self.paths is not None
        path = self.root / self.paths[index]
        try:
            image = decode(path, at_least if self.boxes is None else None)
        except FileNotFoundError:
            raise InputError(f"{path} is missing: restore it, or take it off the list it is named in") from None
        except UNREADABLE as error:
            raise InputError(f"{path} cannot be read as an image ({error}): replace it or take it out") from None
        if self.boxes is None:
            return image
        left, top, right, bottom = self.boxes[index].tolist()
        return image.crop((left, top, right, bottom))

    def describe(self, index: int) -> str:
        """A name for one image in messages and reports: its path, or its class and position."""
        return self.paths[index] if self.paths is not None else f"{self.class_names[self.labels[index]]}/{index}"

    def select(self, indices: np.ndarray, name: str | None = None) -> "ImageSet":
        """The images at `indices`, their classes numbered anew from 0 in the old order."""
        indices = np.asarray(indices)
        kept, labels = np.unique(self.labels[indices], return_inverse=True)
        return replace(
            self,
            name=name or self.name,
            labels=labels.astype(np.int64),
            class_names=[self.class_names[k] for k in kept],
            paths=None if self.paths is None else [self.paths[i] for i in indices],
            boxes=None if self.boxes is None else self.boxes[indices],
            pixels=None if self.pixels is None else self.pixels[indices],
        )


@dataclass(frozen=True)
class Protocol:
    """How a trained model is scored: who asks, who is searched, which K are reported.

    Labels of `query` and `gallery` share one numbering.

    Attributes:
        gallery: None means that each query is compared with all other queries.
        ks: the K of Recall@K.
        one_per_class: above 0, the gallery is one random image of each class, drawn anew that many times (VehicleID).
    """

    name: str
    query: ImageSet
    ks: tuple[int, ...]
    gallery: ImageSet | None = None
    one_per_class: int = 0


@dataclass(frozen=True)
class Dataset:
    """A training set and the protocols of its test classes, which never occur in training."""

    name: str
    train: ImageSet
    protocols: tuple[Protocol, ...]
