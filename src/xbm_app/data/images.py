"""Labeled sets of images: what every reader of a data set returns.

The images are files, pixels in memory, or encoded bytes inside larger files: tar shards, Parquet files, data sets of Hugging
Face.
"""

import os
import posixpath
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.decoding import UNREADABLE, decode, quick
from xbm_app.data.parallel import default_workers, in_order
from xbm_app.progress import track

T = TypeVar("T")

REID, REID_KS = "re-identification", (1, 5, 10)  # CMC@K of that field is Recall@K of the gallery without the query's camera
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labeled images on disk, or in memory if `pixels` is given.

    The position of an image in its set is its instance id.

    Attributes:
        name: the name in messages, e.g. "cars train".
        labels: (N,) int64, 0 ≤ label < len(class_names).
        class_names: one name per class.
        root: the folder that `paths` are relative to.
        paths: N paths relative to `root`, with forward slashes.
        boxes: (N, 4) int64 left, top, right, bottom: the part of each image to use; None for the whole image.
        pixels: (N, H, W) or (N, H, W, 3) uint8, for generated images.
        groups: (N,) int64, such as cameras: a query's gallery is without the images of its class and group.
    """

    name: str
    labels: np.ndarray
    class_names: Sequence[str]
    root: Path | None = None
    paths: Sequence[str] | None = None
    boxes: np.ndarray | None = None
    pixels: np.ndarray | None = None
    groups: np.ndarray | None = None

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
        """Returns the image as RGB, upright, cropped to its box.

        With `at_least`, a JPEG may be decoded at a fraction of its size (see `decode`), which is much faster for photographs
        that are resized anyway. Images with boxes are decoded in full, since boxes are in full-size pixels.
        """
        if self.pixels is not None:
            return Image.fromarray(self.pixels[index]).convert("RGB")
        assert self.root is not None and self.paths is not None
        path = self.root / self.paths[index]
        try:
            image = decode(path, at_least if self.boxes is None else None)
        except FileNotFoundError:
            raise missing_image(path) from None
        except UNREADABLE as error:
            raise InputError(f"{path} cannot be read as an image ({error}): replace or remove it") from None
        if self.boxes is None:
            return image
        left, top, right, bottom = self.boxes[index].tolist()
        shown = (max(0, left), max(0, top), min(right, image.width), min(bottom, image.height))
        if shown[0] >= shown[2] or shown[1] >= shown[3]:
            raise InputError(f"{path}: the box {left}, {top}, {right}, {bottom} lies outside the picture: correct it")
        return image.crop(shown)

    def describe(self, index: int) -> str:
        """Names one image in messages and reports: by its path, or by its class and position."""
        return self.paths[index] if self.paths is not None else f"{self.class_names[self.labels[index]]}/{index}"

    def take(self, indices: np.ndarray) -> "ImageSet":
        """Returns the images at `indices` under the same class numbers."""
        return replace(
            self,
            labels=self.labels[indices],
            paths=None if self.paths is None else [self.paths[i] for i in indices],
            boxes=None if self.boxes is None else self.boxes[indices],
            pixels=None if self.pixels is None else self.pixels[indices],
            groups=None if self.groups is None else self.groups[indices],
        )

    def select(self, indices: np.ndarray, name: str | None = None) -> "ImageSet":
        """Returns the images at `indices` with their classes renumbered from 0, in the old order."""
        indices = np.asarray(indices)
        kept, labels = np.unique(self.labels[indices], return_inverse=True)
        return replace(
            self.take(indices),
            name=name or self.name,
            labels=labels.astype(np.int64),
            class_names=[self.class_names[k] for k in kept],
        )


@dataclass(frozen=True)
class Protocol:
    """How a trained model is scored: the queries, the gallery, and the K to report.

    The labels of `query` and `gallery` share one numbering.

    Attributes:
        gallery: None means that each query is compared with all other queries.
        ks: the K of Recall@K.
        one_per_class: if positive, the gallery is one random image per class, drawn anew this many times (VehicleID).
    """

    name: str
    query: ImageSet
    ks: tuple[int, ...]
    gallery: ImageSet | None = None
    one_per_class: int = 0


@dataclass(frozen=True)
class Dataset:
    """A training set, and the protocols to test on classes that do not occur in training."""

    name: str
    train: ImageSet
    protocols: tuple[Protocol, ...]


def parts(dataset: Dataset) -> dict[str, ImageSet]:
    """Returns the sets of a data set by their short names: train, then test, or query and gallery."""
    sets = {"train": dataset.train}
    for protocol in dataset.protocols:
        for images in (protocol.query, protocol.gallery):
            if images is not None:
                sets[images.name.removeprefix(f"{dataset.name} ")] = images
    return sets


def missing_image(path: Path) -> InputError:
    return InputError(f"{path} is missing: restore it, or remove it from its list")


def readable(
    images: ImageSet, make: Callable[[Image.Image], T], at_least: int, at_once: int, quiet: bool = False
) -> Iterator[tuple[dict[int, T], dict[int, InputError]]]:
    """Applies `make` to every image in threads, and collects errors instead of stopping at the first.

    Yields, for each `at_once` images, the results and the errors, both by index.

    Args:
        at_least: the minimum size to decode a JPEG at; see `decode`.
    """

    def attempt(index: int) -> T | InputError:
        try:
            return make(images.open(index, at_least=at_least))
        except InputError as error:
            return error

    calls = (partial(attempt, index) for index in range(len(images)))
    with closing(in_order(calls, default_workers(), ahead=2 * at_once)) as results:
        tracked = enumerate(track(results, f"embedding {len(images):,} images", total=len(images), quiet=quiet))
        while batch := list(islice(tracked, at_once)):
            failed = {index: result for index, result in batch if isinstance(result, InputError)}
            yield {index: result for index, result in batch if not isinstance(result, InputError)}, failed


@dataclass(frozen=True, slots=True)
class Row:
    """One image, or one box in an image, as a list or table names it.

    Attributes:
        path: relative to the root of the data, with forward slashes.
        label: the name of its class, unchanged.
        where: the file and line of the row, for messages.
        box: left, top, right, bottom in pixels, or None for the whole image.
        group: such as the camera: see `ImageSet`.
    """

    path: str
    label: str
    where: str
    box: tuple[int, int, int, int] | None = None
    group: str = ""


def image_set(name: str, root: Path, rows: Sequence[Row], classes: Sequence[str]) -> ImageSet:
    """Builds a set from `rows`, each labeled by the position of its class in `classes`."""
    if not rows:
        raise InputError(f"{name}: the list under {root} names no image; check that the download is complete")
    number = {label: position for position, label in enumerate(classes)}
    boxed = rows[0].box is not None
    return ImageSet(
        name=name,
        labels=np.array([number[row.label] for row in rows], dtype=np.int64),
        class_names=list(classes),
        root=root,
        paths=[row.path for row in rows],
        boxes=np.array([row.box for row in rows], dtype=np.int64) if boxed else None,
    )


def refuse_two_labels(rows: Sequence[Row]) -> None:
    """Raises an error that names both places if an image (with the same box) has two labels."""
    seen: dict[tuple[str, object], Row] = {}
    for row in rows:
        first = seen.setdefault((row.path, row.box), row)
        if first.label != row.label:
            raise InputError(
                f"{row.where}: {row.path} has label {row.label!r} here and {first.label!r} in {first.where}; keep one"
            )


def inside(path: str, where: str) -> str:
    """Returns `path` in its shortest form, and refuses one that could lead out of the data's root.

    Example:
        >>> inside("./cats//1.jpg", "list.csv, line 2")
        'cats/1.jpg'
    """
    if not path or "\0" in path:
        raise InputError(f"{where}: the path is empty or contains a zero byte; give a path relative to the data's root")
    if "\\" in path:
        raise InputError(f"{where}: write the path with forward slashes, {path.replace(chr(92), '/')!r}")
    if path.startswith("/") or re.match(r"^[A-Za-z]:", path):
        raise InputError(f"{where}: {path!r} is an absolute path; give one relative to the data's root")
    if ".." in path.split("/"):
        raise InputError(f"{where}: {path!r} leads out of the data's root; move the image inside the root")
    return posixpath.normpath(path)


def refuse(error: InputError) -> None:
    """What to do about a malformed row or file, where nothing else is said: stop."""
    raise error


def image_files(root: Path, tell: Callable[[InputError], None] = refuse) -> list[str]:
    """Lists the images below `root`, except hidden ones, as relative paths. Links to folders are followed once.

    Args:
        tell: called with an error for a folder that cannot be listed, or a name that is not UTF-8; both are then left out.
    """
    seen, paths = set(), []

    def unlisted(error: OSError) -> None:
        tell(InputError(f"{error.filename!r} cannot be listed ({error.strerror}): make it readable, or move it away"))

    for folder, folders, files in os.walk(root, followlinks=True, onerror=unlisted):
        real = os.path.realpath(folder)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        if real in seen:
            continue
        seen.add(real)
        for name in sorted(files):
            if name.startswith(".") or Path(name).suffix.lower() not in IMAGE_SUFFIXES:
                continue
            path = Path(folder, name).relative_to(root)
            if any("\ud800" <= letter <= "\udfff" for letter in str(path)):
                tell(InputError(f"{str(root / path)!r}: the name is not UTF-8; rename it"))
                continue
            paths.append(path.as_posix())
    return paths


def write_pictures(images: ImageSet, folder: Path) -> Path:
    """Writes every image of a generated set as `folder/CLASS/0.png` and so on, and returns the folder.

    Example:
        >>> folder_name("U+0416 Ж"), folder_name("U+002F /")
        ('U+0416_Ж', 'U+002F')
    """
    assert images.pixels is not None
    names = [folder_name(name) for name in images.class_names]
    count = [0] * images.num_classes
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for pixels, label in zip(images.pixels, images.labels.tolist()):
        Image.fromarray(pixels).save(folder / names[label] / f"{count[label]}.png", compress_level=1)
        count[label] += 1
    return folder


def folder_name(label: str) -> str:
    """Makes a folder name of a class name: its letters, digits, "+" and "-", so that no name leads out of the folder."""
    words = ("".join(letter for letter in word if letter.isalnum() or letter in "+-") for word in label.split())
    return "_".join(word for word in words if word)


# ------------------------------------------------------------------ images that are bytes inside larger files


class Source(typing.Protocol):
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

    def quick_pixels(self, index: int, size: int) -> np.ndarray | None:
        """The pixels of an image that has this size already, if `quick` can decode it; otherwise None.  # (size, size, 3)"""
        return quick(self.bytes_of(index), size)

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
