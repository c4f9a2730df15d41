"""Your own images: a folder of class folders, or a CSV or Parquet table, split by class unless the data has a split."""

import csv
import hashlib
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from xbm.errors import InputError, unknown
from xbm_app.data.image_tables import COLUMNS, GROUP, Columns, read_records, row_of
from xbm_app.data.images import (
    IMAGE_SUFFIXES,
    REID,
    REID_KS,
    Dataset,
    ImageSet,
    Protocol,
    Row,
    image_files,
    image_set,
    inside,
    refuse_two_labels,
)
from xbm_app.files import replacing

KS = (1, 2, 4, 8, 16, 32)
HALVES = {"train", "test", "val", "valid", "validation"}
PARTS = ("train", "test", "query", "gallery")
Split = dict[str, list[Row]]  # rows by part


def read_folder(root: str | Path, seed: int = 0, test_fraction: float = 0.5) -> Dataset:
    """Reads a folder of class folders.

    Every folder that directly contains images is a class, named by its path below `root`. Hidden files and files that are
    not images are ignored. If the top folders are exactly `train` and `test`, they are the split. Otherwise a fraction of
    the classes is used for testing, the same on every machine for the same `seed` and class names.

    Args:
        root: the folder.
        seed: selects which classes are used for testing.
        test_fraction: the fraction of classes to test on; the benchmarks use half.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give one with a folder of images per class")
    rows = list(_walk(folder))
    if not rows:
        suffixes = ", ".join(sorted(suffix.lstrip(".") for suffix in IMAGE_SUFFIXES))
        raise InputError(f"{folder} holds no images: put them into one folder per class ({suffixes})")
    halves = {row.path.split("/")[0] for row in rows}
    if "train" in halves and len(halves) > 1 and halves <= HALVES and halves != {"train", "test"}:
        raise InputError(f"{folder}: has the folders {', '.join(sorted(halves))}; keep train and test, or give a table")
    if halves != {"train", "test"}:
        return dataset_of(folder.resolve().name, folder, split_by_class(rows, seed, test_fraction, str(folder)))
    split: Split = {part: [] for part in PARTS}
    for row in rows:
        half, _, label = row.label.partition("/")
        if not label:
            raise InputError(f"{row.where}: lies directly in {half}/; move it into {half}/CLASS/")
        split[half].append(Row(row.path, label, row.where))
    return dataset_of(folder.resolve().name, folder, split)


def read_table(
    path: str | Path,
    root: str | Path | None = None,
    seed: int = 0,
    test_fraction: float = 0.5,
    columns: Columns = Columns(),
) -> Dataset:
    """Reads a CSV (UTF-8, comma, header) or Parquet table with one image per row.

    Columns: `path` relative to `root`; `label`; optionally `split` (train, test, query or gallery), `role` (query or
    gallery, for test rows; without it each test image is compared with the other test images) and a box in pixels, `left`,
    `top`, `right`, `bottom`. Other columns are ignored. Without `split` the classes are split as in `read_folder`.

    Args:
        path: the table.
        root: the folder that its paths are relative to (default: the folder of the table).
        seed: selects which classes are used for testing.
        test_fraction: the fraction of classes to test on.
        columns: other names for the columns `label` and `split`; and the one of the groups, such as cameras, whose images
            are left out of a query's gallery.
    """
    table = Path(path)
    split: Split = {part: [] for part in PARTS}
    unsplit: list[Row] = []
    for where, record in read_records(table, columns=columns):
        part = _part(record, where)
        (unsplit if part is None else split[part]).append(row_of(record, where))
    rows = unsplit + [row for part in PARTS for row in split[part]]
    if not rows:
        raise InputError(f"{table} has no rows below its header: give one row per image")
    _refuse_repeats(rows)
    if unsplit:
        split = split_by_class(unsplit, seed, test_fraction, str(table))
    _refuse_incomplete_test(split, table)
    return dataset_of(table.stem, table.parent if root is None else Path(root), split, columns)


def write_split(dataset: Dataset, path: str | Path) -> None:
    """Writes the split of a data set as a CSV that `read_table(path, root=...)` reads back.

    Example:
        >>> write_split(read_folder("photos"), "run/split.csv")                # doctest: +SKIP
        >>> same = read_table("run/split.csv", root="photos")                  # doctest: +SKIP
    """
    if len(dataset.protocols) != 1:
        raise InputError(f"{dataset.name}: a split file holds one test protocol, this data set has {len(dataset.protocols)}")
    protocol = dataset.protocols[0]
    role = "query" if protocol.gallery is not None else ""
    sets = [(dataset.train, "train", ""), (protocol.query, "test", role)]
    if protocol.gallery is not None:
        sets.append((protocol.gallery, "test", "gallery"))
    boxed = any(images.boxes is not None for images, _, _ in sets)
    grouped = any(images.groups is not None for images, _, _ in sets)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # a truncated split must not be taken for a complete one
    with replacing(target, checksum=True) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(COLUMNS if boxed else COLUMNS[:4]), *([GROUP] if grouped else [])])
        for images, part, role in sets:
            for index in range(len(images)):
                box = images.boxes[index].tolist() if images.boxes is not None else []
                label = images.class_names[images.labels[index]]
                group = [] if images.groups is None else [images.groups[index]]
                writer.writerow([images.describe(index), label, part, role, *box, *(group or [""] * grouped)])


def _part(record: dict[str, str], where: str) -> str | None:
    split, role = record.get("split"), record.get("role", "")
    if split is None:
        return None
    if split not in PARTS:
        raise InputError(f"{where}: {unknown('split', split, PARTS)}")
    if role not in ("", "query", "gallery"):
        raise InputError(f"{where}: {unknown('role', role, ('query', 'gallery'))}")
    if role and split != "test" and role != split:
        raise InputError(f"{where}: a {split} row has no role; leave it empty or make the split test")
    return role or split


def _walk(root: Path) -> Iterator[Row]:
    """Yields the images below `root` in the order of their paths, each in the class of its folder."""
    for name in image_files(root):
        path, where = Path(name), str(root / name)
        if len(path.parts) == 1:
            raise InputError(f"{where}: lies beside the class folders; move it into the folder of its class")
        yield Row(inside(path.as_posix(), where), path.parent.as_posix(), where)


def _refuse_repeats(rows: Sequence[Row]) -> None:
    refuse_two_labels(rows)
    seen: dict[tuple[str, object], Row] = {}
    for row in rows:
        first = seen.setdefault((row.path, row.box), row)
        if first is not row:
            raise InputError(f"{row.where}: {row.path} is already listed in {first.where}; keep one of the two rows")


def _refuse_twin_labels(rows: Sequence[Row]) -> None:
    """Refuses labels that read the same: they differ only in outer spaces, or in how an accent is encoded."""
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(unicodedata.normalize("NFC", row.label).strip(), row)
        if first.label != row.label:
            raise InputError(
                f"{row.where}: label {row.label!r} differs from {first.label!r} ({first.where}) only in spaces or "
                "encoding; use one spelling, or two different labels"
            )


def split_by_class(rows: Sequence[Row], seed: int, test_fraction: float, source: str) -> Split:
    """Chooses the test classes by a hash of seed and name, so that neither file order nor a generator's version matters."""
    if not 0 < test_fraction < 1:
        raise InputError(f"test_fraction must be between 0 and 1, got {test_fraction}")
    classes = sorted({row.label for row in rows})
    if len(classes) < 4:
        raise InputError(
            f"{source}: {len(classes)} classes are too few to split into training and testing; give at least four, or a "
            "table with a split column"
        )
    digest = {name: hashlib.sha256(f"{seed}/{name}".encode()).digest() for name in classes}
    share = min(max(round(test_fraction * len(classes)), 2), len(classes) - 2)
    tested = set(sorted(classes, key=digest.__getitem__)[:share])
    split: Split = {part: [] for part in PARTS}
    for row in rows:
        split["test" if row.label in tested else "train"].append(row)
    return split


def _refuse_incomplete_test(split: Split, table: Path) -> None:
    """Checks that every part a protocol needs is present, and that every query has a match."""
    if split["test"] and (split["query"] or split["gallery"]):
        raise InputError(f"{split['test'][0].where}: this test row has no role but others have; give all or none a role")
    if not split["train"]:
        raise InputError(f"{table}: no row has split train; mark some, or drop the split column")
    if not split["test"] and not (split["query"] and split["gallery"]):
        need = "both query and gallery rows are needed" if split["query"] or split["gallery"] else "no row has split test"
        raise InputError(f"{table}: {need}; mark some, or drop the split column")
    labels = {row.label for row in split["gallery"]}
    for row in split["query"]:
        if row.label not in labels:
            raise InputError(f"{row.where}: no gallery row has the label {row.label!r} of this query; add one or drop it")


def dataset_of(name: str, root: Path, split: Split, columns: Columns = Columns()) -> Dataset:
    """A data set of rows by part, with the protocol that they ask for."""
    tested = [row for part in PARTS[1:] for row in split[part]]
    _refuse_twin_labels([*split["train"], *tested])
    shared = {row.label for row in split["train"]} & {row.label for row in tested}
    if shared:
        warnings.warn(
            f"{name}: {len(shared)} classes are in training and in testing, such as {min(shared)!r}: the scores measure "
            "retrieval of known classes, not of new ones",
            stacklevel=3,
        )

    number = _numbered_groups(split["train"], tested)
    if columns.group not in (None, GROUP) and not number:
        raise InputError(f"{name}: no test image has a {columns.group} (data.exclude_same): fill it in, or omit the setting")

    def part(key: str, numbered: Sequence[Row]) -> ImageSet:
        images = image_set(f"{name} {key}", root, split[key], sorted({row.label for row in numbered}))
        known = number and all(row.group for row in split[key])  # training images need none
        return replace(images, groups=np.array([number[row.group] for row in split[key]])) if known else images

    gallery = part("gallery", tested) if split["gallery"] else None
    query = part("test" if gallery is None else "query", tested)
    searched = len(query) - 1 if gallery is None else len(gallery)
    ks = tuple(k for k in KS if k <= searched) or KS[:1]
    label = "test" if gallery is None else "query/gallery"
    if query.groups is not None:
        label, ks = REID, REID_KS
    return Dataset(name, part("train", split["train"]), (Protocol(label, query, ks, gallery=gallery),))


def _numbered_groups(trained: Sequence[Row], tested: Sequence[Row]) -> dict[str, int]:
    """Numbers the groups, such as cameras; {} without any. Either all test rows have one, or none."""
    names = sorted({row.group for row in tested})
    if "" not in names:
        return {name: number for number, name in enumerate(sorted({*names, *(row.group for row in trained)} - {""}))}
    if len(names) > 1:
        nameless = next(row for row in tested if not row.group)
        raise InputError(f"{nameless.where}: the column of data.exclude_same is empty; fill it in for every test row")
    return {}
