"""CSV and Parquet tables as records of text, each with the place it stands in."""

import csv
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from xbm.errors import InputError

BOX = ("left", "top", "right", "bottom")
COLUMNS = ("path", "label", "split", "role", *BOX)


def _refuse(error: InputError) -> None:
    raise error


def read_records(table: Path, tell: Callable[[InputError], None] = _refuse) -> Iterator[tuple[str, dict[str, str]]]:
    """(place, {column: text}) of every row; what is empty or null is the empty text.

    Args:
        tell: is given what is wrong with a row, which is then passed over; by default it is raised.
    """
    if table.suffix.lower() == ".csv":
        return _read_csv(table, tell)
    if table.suffix.lower() == ".parquet":
        return _read_parquet(table)
    raise InputError(f"{table}: a table of images ends in .csv or .parquet")


def _read_csv(table: Path, tell: Callable[[InputError], None]) -> Iterator[tuple[str, dict[str, str]]]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = _header(next(reader, []), table)
            for fields in reader:
                where = f"{table}, line {reader.line_num}"
                if not fields:
                    continue
                if len(fields) != len(header):
                    tell(InputError(f"{where}: {len(fields)} fields under {len(header)} columns; quote what has commas"))
                    continue
                yield where, dict(zip(header, fields))
    except FileNotFoundError:
        raise InputError(f"{table} is missing: give a CSV or Parquet table with the columns path and label") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{table} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from None
    except (OSError, csv.Error) as error:
        raise InputError(f"{table} cannot be read as a CSV ({error}): save it anew, separated by commas") from None


def _read_parquet(table: Path) -> Iterator[tuple[str, dict[str, str]]]:
    import pyarrow
    import pyarrow.parquet

    if not table.is_file():
        raise InputError(f"{table} is missing: give a CSV or Parquet table with the columns path and label")
    try:
        names = pyarrow.parquet.read_schema(table).names
        header = _header(names, table)
        wanted = [name for name, column in zip(names, header) if column in COLUMNS]
        content = pyarrow.parquet.read_table(table, columns=wanted).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{table} cannot be read as Parquet ({error}): write it anew") from None
    columns = dict(zip(names, header))
    for number, record in enumerate(content, start=1):
        where = f"{table}, row {number}"
        yield where, {columns[name]: "" if value is None else str(value) for name, value in record.items()}


def _header(names: Sequence[str], table: Path) -> list[str]:
    """The columns in lower case; a needed one that lacks, or one that looks misspelt, is an error."""
    header = [name.strip().lower() for name in names]
    for column in header:
        if column in COLUMNS and header.count(column) > 1:
            raise InputError(f"{table}: column {column!r} occurs twice; keep one")
    absent = [column for column in COLUMNS if column not in header]
    for column in header:
        near = get_close_matches(column, absent, n=1, cutoff=0.8)
        if column not in COLUMNS and near:
            raise InputError(f"{table}: column {column!r} looks like {near[0]!r}; rename it (columns: {', '.join(COLUMNS)})")
    if "path" in absent or "label" in absent:
        raise InputError(f"{table}: the first line must name the columns path and label, found {', '.join(names) or 'none'}")
    boxed = [column for column in BOX if column in header]
    if boxed and len(boxed) < len(BOX):
        raise InputError(f"{table}: a box needs the columns {', '.join(BOX)}; found only {', '.join(boxed)}")
    if "role" in header and "split" not in header:
        raise InputError(f"{table}: a role column needs a split column beside it, with test for every query and gallery row")
    return header
