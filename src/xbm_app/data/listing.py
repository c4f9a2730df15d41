"""List files become sets of images: paths that stay inside their folder, labels that never merge or collide."""

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xbm.errors import InputError
from xbm_app.data.images import ImageSet

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


@dataclass(frozen=True, slots=True)
class Row:
    """One image (or one box in an image) as a list names it.

    Attributes:
        path: relative to the data's root, with forward slashes.
        label: the name of its class, kept letter for letter.
        where: the file and line it stands in, for messages.
        box: left, top, right, bottom in pixels, or None for the whole picture.
    """

    path: str
    label: str
    where: str
    box: tuple[int, int, int, int] | None = None


def image_files(root: Path) -> list[str]:
    """The images below `root`, hidden ones aside, as paths relative to it; links to folders are followed once."""
    seen, found = set(), []
    for folder, folders, files in os.walk(root, followlinks=True):
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
                raise InputError(f"{str(root / path)!r}: the name is not UTF-8; rename it")
            found.append(path.as_posix())
    return found


def read_lines(file: Path, hint: str, skip: int = 0) -> Iterator[tuple[str, str]]:
    """The lines of a list that are not blank, each with its place ("FILE, line 7"); the first `skip` are headers.

    Args:
        file: the list.
        hint: what to do when it is not there.
        skip: how many lines at the top are no rows.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{file} is missing: {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): get it anew from the data's owner") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if number > skip and line.strip():
            yield f"{file}, line {number}", line.strip()


def split_fields(line: str, names: str, where: str) -> list[str]:
    """The fields of a line, as many as `names` has words; the last one may contain spaces.

    Example:
        >>> split_fields("7 3 a b.jpg", "image_id class_id path", "list.txt, line 2")
        ['7', '3', 'a b.jpg']
    """
    count = len(names.split())
    fields = line.split(maxsplit=count - 1)
    if len(fields) != count:
        raise InputError(f"{where}: expected `{names}`, found {line!r}")
    return fields


def whole_number(text: str, what: str, where: str) -> int:
    """An identifier as a number, so that `0007` and `7` are one class and `7a` is an error."""
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{where}: {what} must be a whole number, found {text!r}") from None


def inside(path: str, where: str) -> str:
    """`path` in its shortest form, refused when it could lead out of the data's root.

    Example:
        >>> inside("./cats//1.jpg", "list.csv, line 2")
        'cats/1.jpg'
    """
    if not path or "\0" in path:
        raise InputError(f"{where}: the path is empty or holds a zero byte; give a path relative to the data's root")
    if "\\" in path:
        raise InputError(f"{where}: write the path with forward slashes, {path.replace(chr(92), '/')!r}")
    if path.startswith("/") or re.match(r"^[A-Za-z]:", path):
        raise InputError(f"{where}: {path!r} is an absolute path; give one relative to the data's root")
    if ".." in path.split("/"):
        raise InputError(f"{where}: {path!r} leads out of the data's root; move the image inside and name it from there")
    return posixpath.normpath(path)


def refuse_two_labels(rows: Sequence[Row]) -> None:
    """An image (with the same box) under two labels is an error that names both places."""
    seen: dict[tuple[str, object], Row] = {}
    for row in rows:
        first = seen.setdefault((row.path, row.box), row)
        if first.label != row.label:
            raise InputError(
                f"{row.where}: {row.path} has label {row.label!r} here and {first.label!r} in {first.where}; keep one"
            )


def refuse_shared_classes(train: Sequence[Row], test: Sequence[Row]) -> None:
    """A benchmark's test classes never occur in training: one that does means that the lists are not the owner's."""
    first = {row.label: row for row in reversed(train)}
    for row in test:
        if row.label in first:
            raise InputError(
                f"{row.where}: class {row.label!r} is a training class in {first[row.label].where}; "
                "get both lists anew from the data's owner"
            )


def class_order(rows: Sequence[Row]) -> list[str]:
    """The labels in the order of their first row: how benchmarks number their classes."""
    return list(dict.fromkeys(row.label for row in rows))


def image_set(name: str, root: Path, rows: Sequence[Row], classes: Sequence[str]) -> ImageSet:
    """The set of `rows`, labelled by the position of their class in `classes`."""
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
