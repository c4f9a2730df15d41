"""Your own images: a folder of class folders, or a CSV or Parquet table, split by class unless the data has a split."""

import csv
import hashlib
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from xbm.errors import InputError, unknown
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
    refuse,
    refuse_two_labels,
)
from xbm_app.files import replacing

KS = (1, 2, 4, 8, 16, 32)
HALVES = {"train", "test", "val", "valid", "validation"}
PARTS = ("train", "test", "query", "gallery")
Split = dict[str, list[Row]]  # rows by part
LARGEST_SIDE = 1 << 30  # pixels, of any picture
BOX = ("left", "top", "right", "bottom")
COLUMNS = ("path", "label", "split", "role", *BOX)
GROUP = "exclude_same"  # the name, in a record, of the column that `Columns.group` names
Records = Iterator[tuple[str, dict[str, str]]]  # (file and line, {column: text})


@dataclass(frozen=True)
class Columns:
    """Which columns of a table say what.

    Attributes:
        label: the class.
        split: train, test, query or gallery.
        group: such as the camera; a query's gallery is without the images of its class and group. None: no such column.
    """

    label: str = "label"
    split: str = "split"
    group: str | None = None


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


# ------------------------------------------------------------------ tables with one image per row, and what their columns mean


def read_records(
    table: Path, tell: Callable[[InputError], None] = refuse, every_column: bool = False, columns: Columns = Columns()
) -> Records:
    """Reads the rows of a CSV or Parquet table as (place, {column: text}). Empty and null values are empty strings.

    The columns that `columns` names are called label, split and exclude_same in the records.

    Args:
        tell: called with the error of a malformed row, which is then skipped (default: raise the error).
        every_column: whether to read the columns of a Parquet table that say nothing about images too.
    """
    if table.exists() and not table.is_file():
        raise InputError(f"{table} is not a file: give a CSV or Parquet table")
    if table.suffix.lower() == ".csv":
        return _read_csv(table, tell, columns)
    if table.suffix.lower() == ".parquet":
        return _read_parquet(table, every_column, columns)
    raise InputError(f"{table}: a table of images must end in .csv or .parquet")


def _read_csv(table: Path, tell: Callable[[InputError], None], columns: Columns) -> Records:
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = _header(next(reader, []), table, columns)
            for fields in reader:
                where = f"{table}, line {reader.line_num}"
                if not fields:
                    continue
                if len(fields) != len(header):
                    tell(InputError(f"{where}: {len(fields)} fields under {len(header)} columns; quote fields with commas"))
                    continue
                yield where, dict(zip(header, fields))
    except FileNotFoundError:
        raise _missing(table) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{table} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from None
    except (OSError, csv.Error) as error:
        raise InputError(f"{table} cannot be read as a CSV ({error}): save it again, separated by commas") from None


def _read_parquet(table: Path, every_column: bool, columns: Columns) -> Records:
    import pyarrow
    import pyarrow.parquet

    if not table.is_file():
        raise _missing(table)
    try:
        names = pyarrow.parquet.read_schema(table).names
        called = dict(zip(names, _header(names, table, columns)))
        used = [name for name, column in called.items() if every_column or column in (*COLUMNS, GROUP)]
        content = pyarrow.parquet.read_table(table, columns=used, page_checksum_verification=True).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{table} cannot be read as Parquet ({error}): write it again") from None
    for number, record in enumerate(content, start=1):
        where = f"{table}, row {number}"
        yield where, {called[name]: "" if value is None else str(value) for name, value in record.items()}


def _missing(table: Path) -> InputError:
    return InputError(f"{table} is missing: give a CSV or Parquet table with the columns path and label")


def _renamed(names: Sequence[str], table: Path, columns: Columns) -> list[str]:
    """The column names in lower case; those that `columns` names are called label, split and exclude_same."""
    chosen = {columns.label.lower(): "label", columns.split.lower(): "split"}
    chosen |= {} if columns.group is None else {columns.group.lower(): GROUP}
    if len(chosen) < 2 + (columns.group is not None):
        raise InputError("data.label, data.split and data.exclude_same must name different columns: correct the settings")
    header = [name.strip().lower() for name in names]
    for column, meaning in chosen.items():
        if column not in header and meaning != column:
            raise InputError(f"{table}: {unknown('column', column, header)}")
    return [chosen.get(name, f"another {name}" if name in chosen.values() else name) for name in header]


def _header(names: Sequence[str], table: Path, columns: Columns) -> list[str]:
    """Returns the column names as `_renamed` does, after checking for missing, repeated and misspelled ones."""
    header = _renamed(names, table, columns)
    for column in header:
        if column in COLUMNS and header.count(column) > 1:
            raise InputError(f"{table}: column {column!r} occurs twice; keep one")
    absent = [column for column in COLUMNS if column not in header]
    for column in header:
        near = get_close_matches(column, absent, n=1, cutoff=0.8)
        if column not in COLUMNS and near:
            raise InputError(f"{table}: column {column!r} looks like {near[0]!r}; rename it (columns: {', '.join(COLUMNS)})")
    if "path" in absent or "label" in absent:
        raise InputError(
            f"{table}: the first line must name the columns path and label, found {', '.join(names) or 'none'} (the setting "
            "data.label names another column for the label)"
        )
    boxed = [column for column in BOX if column in header]
    if boxed and len(boxed) < len(BOX):
        raise InputError(f"{table}: a box needs the columns {', '.join(BOX)}; found only {', '.join(boxed)}")
    if "role" in header and "split" not in header:
        raise InputError(f"{table}: a role column needs a split column, with test for every query and gallery row")
    return header


def row_of(record: dict[str, str], where: str, labelled: bool = True) -> Row:
    """Converts a record of a table to a `Row`. The label may be empty only if `labelled` is False."""
    if labelled and not record["label"].strip():
        raise InputError(f"{where}: the label is empty; name the class or remove the row")
    box = None
    if "left" in record:
        try:
            left, top, right, bottom = (round(float(record[edge])) for edge in BOX)
        except (ValueError, OverflowError):
            raise InputError(f"{where}: {', '.join(BOX)} must be numbers in every row; give the box in pixels") from None
        if max(right, bottom) > LARGEST_SIDE:
            raise InputError(f"{where}: box {left}, {top}, {right}, {bottom} is larger than any picture; give it in pixels")
        if left < 0 or top < 0 or right <= left or bottom <= top:
            raise InputError(f"{where}: box {left}, {top}, {right}, {bottom} is empty or starts outside the picture")
        box = (left, top, right, bottom)
    return Row(inside(record["path"], where), record["label"], where, box, record.get(GROUP, ""))
