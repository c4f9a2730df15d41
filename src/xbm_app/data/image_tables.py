"""Tables with one image per row: CSV or Parquet, and what their columns mean."""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from xbm.errors import InputError, unknown
from xbm_app.data.images import Row, inside, refuse

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
