"""What is known about a benchmark before its files are opened: owner, terms, layout, counts, and its reader."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xbm_app.data.images import Dataset, ImageSet


@dataclass(frozen=True)
class Count:
    """The size of one part of a benchmark; None where no figure is stated.

    Attributes:
        images: picture files.
        classes: classes among them.
        items: boxes in them, for benchmarks that crop several items out of a picture.
    """

    images: int | None = None
    classes: int | None = None
    items: int | None = None

    def __str__(self) -> str:
        units = (self.images, "images"), (self.classes, "classes"), (self.items, "items")
        return " / ".join(f"{value:,} {unit}" for value, unit in units if value is not None)


def count(images: ImageSet) -> Count:
    """The size of a set as it was read."""
    assert images.paths is not None
    items = len(images) if images.boxes is not None else None
    return Count(len(set(images.paths)), len(np.unique(images.labels)), items)


def nothing_missing(dataset: Dataset) -> list[str]:
    """For layouts whose lists name every image: one that is not there is found when it is opened."""
    return []


@dataclass(frozen=True)
class Benchmark:
    """One public benchmark.

    Attributes:
        name: what the command line calls it.
        title: what its owners call it.
        source: where it comes from.
        terms: what its owners allow.
        layout: the files that the reader expects under the root.
        ks: the K of Recall@K that the literature reports.
        paper: counts by part ("train", "test", "query", ...) as printed in the XBM paper.
        release: counts of the files that the owners hand out; `check` holds a copy to these.
        read: reads a root folder into a data set.
        missing: names images that a complete copy has and this one lacks, where no list names them.
    """

    name: str
    title: str
    source: str
    terms: str
    layout: str
    ks: tuple[int, ...]
    paper: Mapping[str, Count]
    release: Mapping[str, Count]
    read: Callable[[Path], Dataset]
    missing: Callable[[Dataset], list[str]] = nothing_missing
