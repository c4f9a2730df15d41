"""What the benchmarks share: the description of a benchmark, and reading the list files that its owners hand out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xbm.errors import InputError
from xbm_app.data.images import Dataset, ImageSet, Protocol, Row, image_set, refuse_two_labels


@dataclass(frozen=True)
class Count:
    """The size of one part of a benchmark; None if no figure is stated.

    Attributes:
        images: image files.
        classes: classes among them.
        items: boxes in them, for benchmarks that crop several items from one image.
    """

    images: int | None = None
    classes: int | None = None
    items: int | None = None

    def __str__(self) -> str:
        units = (self.images, "images"), (self.classes, "classes"), (self.items, "items")
        return " / ".join(f"{value:,} {unit}" for value, unit in units if value is not None)


def count(images: ImageSet) -> Count:
    """Returns the size of a set."""
    assert images.paths is not None
    items = len(images) if images.boxes is not None else None
    return Count(len(set(images.paths)), len(np.unique(images.labels)), items)


@dataclass(frozen=True)
class Benchmark:
    """One public benchmark.

    Attributes:
        name: its name on the command line.
        title: its official name.
        source: where it comes from.
        terms: what its owners allow.
        layout: the files that the reader expects under the root.
        ks: the K of Recall@K that the literature reports.
        paper: counts by part ("train", "test", "query", ...) as printed in the XBM paper.
        release: counts of the official release; `xbm datasets check` compares a copy with these.
        read: reads a root folder into a data set.
        missing: names the images that this copy lacks. By default none: if lists name every image, a missing one is
            noticed when it is opened.
        redistributable: whether the terms permit publishing images of it, as in a figure of the documentation.
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
    missing: Callable[[Dataset], list[str]] = lambda dataset: []
    redistributable: bool = False


def leave_one_out(name: str, root: Path, train: Sequence[Row], test: Sequence[Row], ks: tuple[int, ...]) -> Dataset:
    """Builds a data set whose test images are each searched among all others, after checking that no image has two labels."""
    refuse_two_labels([*train, *test])
    query = image_set(f"{name} test", root, test, class_order(test))
    return Dataset(name, image_set(f"{name} train", root, train, class_order(train)), (Protocol("test", query, ks),))


def query_gallery(
    name: str,
    root: Path,
    train: Sequence[Row],
    query: Sequence[Row],
    gallery: Sequence[Row],
    classes: Sequence[str],
    ks: tuple[int, ...],
) -> Dataset:
    """Builds a data set whose queries are searched in a separate gallery; `classes` numbers the labels of both."""
    searched = image_set(f"{name} gallery", root, gallery, classes)
    protocol = Protocol("query/gallery", image_set(f"{name} query", root, query, classes), ks, gallery=searched)
    return Dataset(name, image_set(f"{name} train", root, train, class_order(train)), (protocol,))


def read_lines(file: Path, hint: str, skip: int = 0) -> Iterator[tuple[str, str]]:
    """Reads the lines of a list that are not blank, each with its place ("FILE, line 7").

    Args:
        file: the list.
        hint: what to do if the file is missing.
        skip: the number of header lines.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{file} is missing: {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): download it again from the data's owner") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if number > skip and line.strip():
            yield f"{file}, line {number}", line.strip()


def split_fields(line: str, names: str, where: str) -> list[str]:
    """Splits a line into as many fields as `names` has words; the last field may contain spaces.

    Example:
        >>> split_fields("7 3 a b.jpg", "image_id class_id path", "list.txt, line 2")
        ['7', '3', 'a b.jpg']
    """
    width = len(names.split())
    fields = line.split(maxsplit=width - 1)
    if len(fields) != width:
        raise InputError(f"{where}: expected `{names}`, found {line!r}")
    return fields


def whole_number(text: str, what: str, where: str) -> int:
    """Parses an identifier as a number, so that `0007` and `7` are the same class and `7a` is an error."""
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{where}: {what} must be a whole number, found {text!r}") from None


def class_order(rows: Sequence[Row]) -> list[str]:
    """Returns the labels in the order of their first row, which is how benchmarks number their classes."""
    return list(dict.fromkeys(row.label for row in rows))


def refuse_shared_classes(train: Sequence[Row], test: Sequence[Row]) -> None:
    """Refuses test classes that occur in training: in no benchmark they do, so the lists are not the owner's."""
    first = {row.label: row for row in reversed(train)}
    for row in test:
        if row.label in first:
            raise InputError(
                f"{row.where}: class {row.label!r} is a training class in {first[row.label].where}; "
                "download both lists again from the data's owner"
            )
