"""Anyone's own images: a folder of class folders, or a CSV / Parquet table; split by class when no split is given."""

import csv
import hashlib
import os
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from xbm.errors import InputError, unknown
from xbm_app.data.images import Dataset, ImageSet, Protocol
from xbm_app.data.listing import IMAGE_SUFFIXES, Row, image_files, image_set, inside, refuse_two_labels
from xbm_app.data.tables import BOX, COLUMNS, read_records

KS = (1, 2, 4, 8, 16, 32)
HALVES = {"train", "test", "val", "valid", "validation"}
PARTS = ("train", "test", "query", "gallery")
Parted = dict[str, list[Row]]  # rows by part


def read_folder(root: str | Path, seed: int = 0, test_fraction: float = 0.5) -> Dataset:
    """Reads a folder of class folders.

    Every folder that directly holds images is a class, named by its path below `root`. Hidden files and files that are
    no images are passed over. When the top folders are exactly `train` and `test`, they are the split; otherwise a
    share of the classes is set aside for testing, the same for the same `seed` and class names on every machine.

    Args:
        root: the folder.
        seed: another seed sets aside other classes.
        test_fraction: the share of the classes that is tested on; the benchmarks use half.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give one that holds a folder of images for each class")
    rows = list(_walk(folder))
    if not rows:
        raise InputError(f"{folder} holds no images: put them into one folder a class ({_suffixes()})")
    halves = {row.path.split("/")[0] for row in rows}
    if "train" in halves and len(halves) > 1 and halves <= HALVES and halves != {"train", "test"}:
        raise InputError(f"{folder}: has the folders {', '.join(sorted(halves))}; keep train and test, or give a table")
    if halves == {"train", "test"}:
        parted: Parted = {part: [] for part in PARTS}
        for row in rows:
            half, _, label = row.label.partition("/")
            if not label:
                raise InputError(f"{row.where}: lies directly in {half}/; move it into {half}/CLASS/")
            parted[half].append(Row(row.path, label, row.where))
        return _dataset(folder.resolve().name, folder, parted)
    return _dataset(folder.resolve().name, folder, _split(rows, seed, test_fraction, str(folder)))


def read_table(path: str | Path, root: str | Path | None = None, seed: int = 0, test_fraction: float = 0.5) -> Dataset:
    """Reads a CSV (UTF-8, comma, header) or Parquet table with one image a row.

    Columns: `path` relative to `root`; `label`; optional `split` (train or test), `role` (query or gallery, for test
    rows; without it each test image is searched among the others) and the box columns `left`, `top`, `right`, `bottom`
    in pixels. Other columns are passed over. Without `split` the classes are split as in `read_folder`.

    Args:
        path: the table.
        root: the folder that its paths start from; the folder of the table unless given.
        seed: another seed sets aside other classes.
        test_fraction: the share of the classes that is tested on.
    """
    table = Path(path)
    base = table.parent if root is None else Path(root)
    parted: Parted = {part: [] for part in PARTS}
    unsplit: list[Row] = []
    for where, record in read_records(table):
        part = _part(record, where)
        (unsplit if part is None else parted[part]).append(row_of(record, where))
    rows = unsplit + [row for part in PARTS for row in parted[part]]
    if not rows:
        raise InputError(f"{table} has no rows below its header: give one row an image")
    _refuse_repeats(rows)
    if unsplit:
        parted = _split(unsplit, seed, test_fraction, str(table))
    _refuse_half_a_test(parted, table)
    return _dataset(table.stem, base, parted)


def write_split(dataset: Dataset, path: str | Path) -> None:
    """Writes who trains and who is tested as a CSV that `read_table(path, root=...)` reads back.

    Example:
        >>> write_split(read_folder("photos"), "run/split.csv")                # doctest: +SKIP
        >>> same = read_table("run/split.csv", root="photos")                  # doctest: +SKIP
    """
    if len(dataset.protocols) != 1:
        raise InputError(f"{dataset.name}: a split file holds one way to test, this data set has {len(dataset.protocols)}")
    protocol = dataset.protocols[0]
    role = "query" if protocol.gallery is not None else ""
    sets = [(dataset.train, "train", ""), (protocol.query, "test", role)]
    if protocol.gallery is not None:
        sets.append((protocol.gallery, "test", "gallery"))
    boxed = any(images.boxes is not None for images, _, _ in sets)
    target = Path(path)
    draft = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    with draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS if boxed else COLUMNS[:4])
        for images, split, role in sets:
            for index in range(len(images)):
                box = images.boxes[index].tolist() if images.boxes is not None else []
                label = images.class_names[images.labels[index]]
                writer.writerow([images.describe(index), label, split, role, *box])
    os.replace(draft, target)  # a split that was cut short must not pass for a whole one


def _suffixes() -> str:
    return ", ".join(sorted(suffix.lstrip(".") for suffix in IMAGE_SUFFIXES))


def _walk(root: Path) -> Iterator[Row]:
    """The images below `root` in the order of their paths, each in the class of its folder."""
    for name in image_files(root):
        path, where = Path(name), str(root / name)
        if len(path.parts) == 1:
            raise InputError(f"{where}: lies beside the class folders; move it into the folder of its class")
        yield Row(inside(path.as_posix(), where), path.parent.as_posix(), where)


def _part(record: dict[str, str], where: str) -> str | None:
    split, role = record.get("split"), record.get("role", "")
    if split is None:
        return None
    if split not in ("train", "test"):
        raise InputError(f"{where}: {unknown('split', split, ('train', 'test'))}")
    if role not in ("", "query", "gallery"):
        raise InputError(f"{where}: {unknown('role', role, ('query', 'gallery'))}")
    if role and split == "train":
        raise InputError(f"{where}: a train row has no role; leave it empty or make the split test")
    return role or split


def row_of(record: dict[str, str], where: str, labelled: bool = True) -> Row:
    """The image that a record of a table names, with its label and box; a label may be empty only where none is needed."""
    if labelled and not record["label"].strip():
        raise InputError(f"{where}: the label is empty; name the class or take the row out")
    box = None
    if "left" in record:
        try:
            left, top, right, bottom = (round(float(record[edge])) for edge in BOX)
        except (ValueError, OverflowError):
            raise InputError(f"{where}: {', '.join(BOX)} must be numbers in every row; give the box in pixels") from None
        if left < 0 or top < 0 or right <= left or bottom <= top:
            raise InputError(f"{where}: box {left}, {top}, {right}, {bottom} is empty or starts outside the picture")
        box = (left, top, right, bottom)
    return Row(inside(record["path"], where), record["label"], where, box)


def _refuse_repeats(rows: Sequence[Row]) -> None:
    refuse_two_labels(rows)
    seen: dict[tuple[str, object], Row] = {}
    for row in rows:
        first = seen.setdefault((row.path, row.box), row)
        if first is not row:
            raise InputError(f"{row.where}: {row.path} already stands in {first.where}; keep one of the two rows")


def _refuse_twin_labels(rows: Sequence[Row]) -> None:
    """Labels that a person reads as one: they differ in outer spaces, or in how an accent is encoded."""
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(unicodedata.normalize("NFC", row.label).strip(), row)
        if first.label != row.label:
            raise InputError(
                f"{row.where}: label {row.label!r} differs from {first.label!r} ({first.where}) only in spaces or "
                "encoding; spell them alike, or apart"
            )


def _split(rows: Sequence[Row], seed: int, test_fraction: float, what: str) -> Parted:
    """Sets classes aside by the hash of seed and name: no generator's version, no order of files decides."""
    if not 0 < test_fraction < 1:
        raise InputError(f"test_fraction is {test_fraction}: give a share between 0 and 1, such as 0.5")
    classes = sorted({row.label for row in rows})
    if len(classes) < 4:
        raise InputError(
            f"{what}: {len(classes)} classes are too few to set some aside for testing; four are needed, or a table "
            "with a split column"
        )
    digest = {name: hashlib.sha256(f"{seed}/{name}".encode()).digest() for name in classes}
    share = min(max(round(test_fraction * len(classes)), 2), len(classes) - 2)
    tested = set(sorted(classes, key=digest.__getitem__)[:share])
    parted: Parted = {part: [] for part in PARTS}
    for row in rows:
        parted["test" if row.label in tested else "train"].append(row)
    return parted


def _refuse_half_a_test(parted: Parted, table: Path) -> None:
    """Every part that a protocol needs is there, and every query can be answered."""
    if parted["test"] and (parted["query"] or parted["gallery"]):
        raise InputError(f"{parted['test'][0].where}: this test row has no role but others have; give all or none a role")
    if not parted["train"]:
        raise InputError(f"{table}: no row has split train; mark some, or drop the split column")
    if not parted["test"] and not (parted["query"] and parted["gallery"]):
        need = "both query and gallery rows are needed" if parted["query"] or parted["gallery"] else "no row has split test"
        raise InputError(f"{table}: {need}; mark some, or drop the split column")
    findable = {row.label for row in parted["gallery"]}
    for row in parted["query"]:
        if row.label not in findable:
            raise InputError(f"{row.where}: no gallery row has the label {row.label!r} of this query; add one or drop it")


def _dataset(name: str, root: Path, parted: Parted) -> Dataset:
    rows = [row for part in PARTS for row in parted[part]]
    _refuse_twin_labels(rows)
    tested = [row for part in PARTS[1:] for row in parted[part]]
    shared = {row.label for row in parted["train"]} & {row.label for row in tested}
    if shared:
        warnings.warn(
            f"{name}: {len(shared)} classes are in training and in testing, such as {min(shared)!r}: the scores tell "
            "how well known classes are found, not new ones",
            stacklevel=3,
        )
    train = _set(f"{name} train", root, parted["train"], parted["train"])
    gallery = None
    if parted["gallery"]:
        query = _set(f"{name} query", root, parted["query"], tested)
        gallery = _set(f"{name} gallery", root, parted["gallery"], tested)
    else:
        query = _set(f"{name} test", root, parted["test"], tested)
    searched = len(query) - 1 if gallery is None else len(gallery)
    ks = tuple(k for k in KS if k <= searched) or KS[:1]
    label = "test" if gallery is None else "query/gallery"
    return Dataset(name, train, (Protocol(label, query, ks, gallery=gallery),))


def _set(name: str, root: Path, rows: Sequence[Row], numbered: Sequence[Row]) -> ImageSet:
    return image_set(name, root, rows, sorted({row.label for row in numbered}))
