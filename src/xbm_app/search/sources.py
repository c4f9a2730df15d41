"""What is to be indexed: the images of a folder or of a table, each with what tells whether it has changed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from xbm.errors import InputError
from xbm_app.data.images import Row, image_files
from xbm_app.data.own_images import read_records, row_of

TABLES = (".csv", ".parquet")
Box = tuple[int, int, int, int]
Tell = Callable[[InputError], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One image, or one box in an image.

    Attributes:
        path: relative to the source's root, with forward slashes.
        label: the folder it lies in, or what the table says; may be empty.
        size, time: bytes and modification time (ns) of its file.
    """

    path: str
    label: str
    size: int
    time: int
    box: Box | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What makes it another image than every other: its path and, written as text, its box."""
        return self.path, "" if self.box is None else ",".join(map(str, self.box))


def root_of(source: Path) -> Path:
    """The folder that the paths of a source start from."""
    return source if source.is_dir() else source.parent


def entries_of(source: Path, tell: Tell) -> list[Entry]:
    """The images of a folder (to its bottom; labels are folders), or of a CSV or Parquet table with path and label.

    Args:
        tell: is given a sentence for every row or file that is left out: the others are indexed all the same.

    Raises:
        InputError: there is no image at all, so that a disk that is not mounted never empties an index.
    """
    if source.is_dir():
        rows: Iterable[Row] = [
            Row(path, "" if "/" not in path else path.rpartition("/")[0], str(source / path)) for path in image_files(source)
        ]
    elif source.suffix.lower() in TABLES:
        rows = _table(source, tell)
    else:
        raise InputError(f"{source} is neither a folder nor a .csv or .parquet table: give one that holds or names images")
    root, found = root_of(source), dict[tuple[str, str], Entry]()
    for row in rows:
        try:
            entry = _entry(root, row)
        except InputError as error:
            tell(error)
            continue
        if found.setdefault(entry.key, entry) is not entry:
            tell(InputError(f"{row.where}: {row.path} is named twice: the first one counts"))
    if not found:
        raise InputError(f"{source} holds no images that can be indexed (jpg, png, webp, ...): give another one")
    return list(found.values())


def _table(table: Path, tell: Tell) -> Iterable[Row]:
    for where, record in read_records(table, tell):
        try:
            yield row_of(record, where, labelled=False)
        except InputError as error:
            tell(error)


def _entry(root: Path, row: Row) -> Entry:
    try:
        stat = (root / row.path).stat()
    except OSError:
        raise InputError(f"{row.where}: {row.path} is missing: it is left out") from None
    return Entry(row.path, row.label, stat.st_size, stat.st_mtime_ns, row.box)
