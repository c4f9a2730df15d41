"""Checks a data set before hours are spent training on it, and removes the images that have problems."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from xbm.errors import InputError
from xbm_app.data.decoding import UNREADABLE, eight_bits, open_image
from xbm_app.data.images import Dataset, EncodedSet, ImageSet, parts
from xbm_app.data.parallel import in_order
from xbm_app.data.store import StoredSet
from xbm_app.progress import printable, track

MIN_SIDE = 16  # pixels; a crop of 224 from a smaller image is all interpolation

KINDS = {
    "missing": "not there",
    "unreadable": "not readable as an image",
    "tiny": f"with a side under {MIN_SIDE} pixels",
    "duplicate": "of training with the same bytes as a test image",
    "single": "of training alone in its class, so without a positive pair",
    "unmatched": "of testing without another image of its class to find",
}
BROKEN = ("missing", "unreadable")

T = TypeVar("T", bound=Hashable)
R = TypeVar("R")


@dataclass(frozen=True)
class Problem:
    """One problem of one image.

    Attributes:
        kind: a key of KINDS.
        part: the name of its set.
        index: its position in that set.
        text: the name of the image and, if known, the reason.
    """

    kind: str
    part: str
    index: int
    text: str


@dataclass(frozen=True)
class _File:
    """The size of a file in bytes and pixels, or why it could not be opened."""

    bytes: int = 0
    width: int = 0
    height: int = 0
    kind: str = ""
    error: str = ""


def check_dataset(dataset: Dataset, quiet: bool = False) -> list[Problem]:
    """Opens every image and returns the problems; see KINDS. `skip_problems` removes them.

    Files that several sets share are opened once. Exact duplicates are searched between training and testing, among files
    of equal size.
    """
    sets = parts(dataset)
    paths = sorted({path for images in sets.values() for path in _paths(images)})
    files = dict(zip(paths, _parallel(_open, paths, "opening images", quiet)))
    problems = [problem for images in sets.values() for problem in _file_problems(images, files)]
    problems += _duplicates(sets, files, quiet)
    dropped = {(problem.part, problem.index) for problem in problems}
    problems += _singles(dataset.train, dropped)
    unmatched = (problem for each in dataset.protocols for problem in _unmatched(each.query, each.gallery))
    return problems + list(dict.fromkeys(unmatched))  # protocols may share a set


def report(problems: Sequence[Problem], limit: int = 20) -> str:
    """Formats the problems: a headline per kind, the first `limit` images, and the number of further ones."""
    lines = []
    for kind, meaning in KINDS.items():
        texts = list(dict.fromkeys(problem.text for problem in problems if problem.kind == kind))
        if texts:
            lines.append(f"{len(texts):,} {'image' if len(texts) == 1 else 'images'} {meaning}:")
            lines += listed(texts, limit)
    return "\n".join(lines)


def listed(texts: Sequence[str], limit: int = 20) -> list[str]:
    """Returns the first `limit` texts, indented, and a line with the number of further ones."""
    more = [f"  ... and {len(texts) - limit:,} more"] if len(texts) > limit else []
    return [f"  {printable(text)}" for text in texts[:limit]] + more


def skip_problems(dataset: Dataset, problems: Iterable[Problem]) -> Dataset:
    """Returns the data set without the images that have problems.

    Broken images are removed from every set. Tiny images, duplicates of test images and classes of one image are removed from
    training only: testing keeps every image that can be opened, so that scores stay comparable.
    """
    drop: dict[str, set[int]] = defaultdict(set)
    for problem in problems:
        if problem.kind in BROKEN or problem.part == dataset.train.name:
            drop[problem.part].add(problem.index)
    kept = {images.name: _without(images, drop[images.name]) for images in parts(dataset).values()}
    train = kept[dataset.train.name]
    return Dataset(
        dataset.name,
        train.select(np.arange(len(train))) if drop[train.name] else train,
        tuple(
            replace(each, query=kept[each.query.name], gallery=None if each.gallery is None else kept[each.gallery.name])
            for each in dataset.protocols
        ),
    )


def _without(images: ImageSet, drop: set[int]) -> ImageSet:
    """Returns the set without some images. Class numbers stay, since query and gallery share them."""
    if not drop:
        return images
    keep = np.array([index for index in range(len(images)) if index not in drop], dtype=np.int64)
    if not len(keep):
        raise InputError(f"{images.name}: no image is left after removing the broken ones; repair the data")
    return images.take(keep)


def _paths(images: ImageSet) -> list[Path]:
    if images.paths is None or images.root is None or isinstance(images, StoredSet | EncodedSet):
        return []  # generated, or in a store, whose images were opened when it was made, or in shards, which may be huge
    return [images.root / path for path in images.paths]


def _open(path: Path) -> _File:
    try:
        with open_image(path) as file:
            width, height = file.size
            if file.getexif().get(0x0112) in (5, 6, 7, 8):  # orientations that swap width and height
                width, height = height, width
            file.draft("RGB", (64, 64))  # decodes a JPEG at a small size, but to its last byte
            file.load()
            eight_bits(file)
        return _File(path.stat().st_size, width, height)
    except (FileNotFoundError, NotADirectoryError):
        return _File(kind="missing")
    except UNREADABLE as error:
        return _File(kind="unreadable", error=str(error).replace(str(path), "it"))


def _file_problems(images: ImageSet, files: dict[Path, _File]) -> list[Problem]:
    problems = []
    for index, path in enumerate(_paths(images)):
        file, name = files[path], images.describe(index)
        if file.kind:
            text = f"{name}: {file.error}" if file.error else name
            problems.append(Problem(file.kind, images.name, index, text))
            continue
        width, height = file.width, file.height
        if images.boxes is not None:
            left, top, right, bottom = images.boxes[index].tolist()
            box = f"{name}: box {left}, {top}, {right}, {bottom} in a picture of {width} × {height}"
            width, height = min(right, width) - max(left, 0), min(bottom, height) - max(top, 0)
            if min(width, height) <= 0 or right <= left or bottom <= top:
                problems.append(Problem("unreadable", images.name, index, f"{box} shows nothing"))
                continue
        if min(width, height) < MIN_SIDE:
            problems.append(Problem("tiny", images.name, index, f"{name}: {width} × {height}"))
    return problems


def _duplicates(sets: dict[str, ImageSet], files: dict[Path, _File], quiet: bool) -> list[Problem]:
    train = set(_paths(sets["train"]))
    tested = {path for part, images in sets.items() if part != "train" for path in _paths(images)}
    sizes = {files[path].bytes for path in train} & {files[path].bytes for path in tested} - {0}
    suspects = sorted(path for path in train | tested if files[path].bytes in sizes)
    digests = dict(zip(suspects, _parallel(_digest, suspects, "comparing files", quiet)))
    twins = {digests[path]: path for path in suspects if path in tested}
    problems = []
    for index, path in enumerate(_paths(sets["train"])):
        twin = twins.get(digests.get(path, b""))
        if twin is not None:
            text = f"{sets['train'].describe(index)} = {os.path.relpath(twin, sets['train'].root)}"
            problems.append(Problem("duplicate", sets["train"].name, index, text))
    return problems


def _digest(path: Path) -> bytes:
    return hashlib.blake2b(path.read_bytes()).digest()


def _singles(train: ImageSet, dropped: set[tuple[str, int]]) -> list[Problem]:
    """Finds training images that are alone in their class after the other problems are removed."""
    kept = [index for index in range(len(train)) if (train.name, index) not in dropped]
    sizes = np.bincount(train.labels[kept], minlength=train.num_classes)
    return [
        Problem("single", train.name, index, f"{train.describe(index)} ({train.class_names[train.labels[index]]})")
        for index in kept
        if sizes[train.labels[index]] == 1
    ]


def _unmatched(query: ImageSet, gallery: ImageSet | None) -> list[Problem]:
    searched = query if gallery is None else gallery
    sizes = np.bincount(searched.labels, minlength=max(query.num_classes, searched.num_classes))
    enough = 2 if gallery is None else 1  # without a gallery, the image itself is one of its class
    return [
        Problem("unmatched", query.name, int(index), query.describe(int(index)))
        for index in np.flatnonzero(sizes[query.labels] < enough)
    ]


def _parallel(work: Callable[[T], R], items: Sequence[T], description: str, quiet: bool) -> list[R]:
    workers = os.cpu_count() or 1
    results = in_order((partial(work, item) for item in items), workers, ahead=4 * workers)
    return list(track(results, description, total=len(items), quiet=quiet))
