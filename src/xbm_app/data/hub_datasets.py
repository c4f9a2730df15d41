"""Data sets of Hugging Face: from a folder, a Parquet file with images in it, or the hub. Needs the extra `hub`."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xbm.errors import InputError, unknown
from xbm_app.data.images import Dataset, Row, encoded
from xbm_app.data.own_images import PARTS, Columns, dataset_of, split_by_class
from xbm_app.extras import require

PREFIX = "hf:"
SAVED = ("dataset_dict.json", "state.json")  # in a folder written by `save_to_disk`


@dataclass(frozen=True)
class ArrowImages:
    """The images of some Arrow chunks, by row: a `Source`. Chunks are memory-mapped files of the datasets package.

    Attributes:
        chunks: per chunk the column of the bytes and that of the paths, or None.
        starts: (chunks + 1,) the first row of each, and the number of rows.
        sizes, times, shards: (N,) int64; the times are 0, the shards those of the chunks.
    """

    chunks: list[tuple[Any, Any]]
    starts: np.ndarray
    sizes: np.ndarray
    times: np.ndarray
    shards: np.ndarray

    def read(self, row: int) -> bytes:
        chunk = int(self.shards[row])
        content, paths = self.chunks[chunk]
        place = row - int(self.starts[chunk])
        scalar = content[place]
        if scalar.is_valid:
            return bytes(scalar.as_buffer())
        path = None if paths is None else paths[place].as_py()
        if path is None:
            raise FileNotFoundError(2, "the data set has neither its bytes nor its path")
        return Path(path).read_bytes()


def has_images(table: Path) -> bool:
    """Whether a Parquet file holds images, in a column `image` of bytes, instead of a table of their paths."""
    import pyarrow
    import pyarrow.parquet

    try:
        schema = pyarrow.parquet.read_schema(table)
    except (OSError, pyarrow.ArrowException):
        return False  # read_table says what is wrong with it
    return "path" not in [name.strip().lower() for name in schema.names] and _image_column(schema) is not None


def read_hub(name: str, seed: int = 0, test_fraction: float = 0.5, columns: Columns = Columns()) -> Dataset:
    """Reads a data set by the name of a folder, a Parquet file, or of a data set on the hub.

    The images are the column `image`, or the first that holds images. If there are splits train and test, or train, query and
    gallery, they are used; otherwise the classes of all rows are split as in `read_folder`.

    Args:
        columns: the columns of the labels and the groups; that of the split is not used.
    """
    require("hub", "datasets")
    splits = _load(name)
    tables = {part: table for part, table in splits.items() if part in PARTS}  # others, such as validation, are left out
    if set(tables) not in ({"train", "test"}, {"train", "query", "gallery"}):
        if len(splits) > 1:
            raise InputError(
                f"{PREFIX}{name} has the splits {', '.join(splits)}: it needs train and test, or train, query and gallery"
            )
        tables = splits
    rows: dict[str, list[Row]] = {part: _rows(name, part, table, columns) for part, table in tables.items()}
    source = _source(name, [table.data for table in tables.values()])
    row_of = {row.path: number for number, row in enumerate(row for part in rows.values() for row in part)}
    if len(rows) == 1:
        (everything,) = rows.values()
        split = split_by_class(everything, seed, test_fraction, f"{PREFIX}{name}")
    else:
        split = {part: rows.get(part, []) for part in PARTS}
    path = Path(name)
    called = path.stem if path.exists() else path.name
    return encoded(dataset_of(called, path if path.is_dir() else path.parent, split, columns), source, row_of)


def _load(name: str) -> dict[str, Any]:
    """The splits of a data set, without any selection or order of rows."""
    import datasets

    path = Path(name)
    try:
        if path.is_file():
            loaded = datasets.load_dataset("parquet", data_files={"train": [str(path)]})
        elif any((path / file).exists() for file in SAVED):
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(name)
    except ConnectionError:
        raise InputError(f"{PREFIX}{name}: no such folder, and the hub does not answer: give a folder, or connect") from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"{PREFIX}{name} cannot be read ({reason}): give a folder, a Parquet file or a hub name") from None
    splits = {"train": loaded} if isinstance(loaded, datasets.Dataset) else dict(loaded)
    return {part: table.flatten_indices() if table._indices is not None else table for part, table in splits.items()}


def _rows(name: str, part: str, table: Any, columns: Columns) -> list[Row]:
    if columns.label not in table.column_names:
        raise InputError(f"{PREFIX}{name}: {unknown('column', columns.label, table.column_names)} (data.label)")
    if columns.group is not None and columns.group not in table.column_names:
        raise InputError(f"{PREFIX}{name}: {unknown('column', columns.group, table.column_names)} (data.exclude_same)")
    labels = table.data.column(columns.label).to_pylist()
    names = getattr(table.features[columns.label], "names", None)  # of a ClassLabel
    groups = [""] * len(labels) if columns.group is None else table.data.column(columns.group).to_pylist()
    rows = []
    for number, (label, group) in enumerate(zip(labels, groups)):
        where = f"{PREFIX}{name}, {part} row {number}"
        if label is None or (label == -1 and names) or not str(label).strip():
            raise InputError(f"{where}: the label is empty; name the class or remove the row")
        text = names[label] if names else str(label)
        rows.append(Row(f"{part}/{number}", text, where, group="" if group is None else str(group)))
    return rows


def _image_column(schema: Any) -> str | None:
    """The column that holds images: of structs with bytes, `image` if it is one of several."""
    import pyarrow

    found = [field.name for field in schema if pyarrow.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0]
    return "image" if "image" in found else next(iter(found), None)


def _source(name: str, tables: Iterable[Any]) -> ArrowImages:
    import pyarrow.compute

    chunks: list[tuple[Any, Any]] = []
    for table in tables:
        column = _image_column(table.schema)
        if column is None:
            raise InputError(f"{PREFIX}{name} has no column of images, only {', '.join(table.schema.names)}")
        for chunk in table.column(column).chunks:
            paths = chunk.field("path") if chunk.type.get_field_index("path") >= 0 else None
            chunks.append((chunk.field("bytes"), paths))
    lengths = [len(content) for content, _ in chunks]
    measured = [pyarrow.compute.binary_length(content).fill_null(0).to_numpy(zero_copy_only=False) for content, _ in chunks]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    sizes = np.concatenate(measured).astype(np.int64) if measured else np.empty(0, np.int64)
    return ArrowImages(chunks, starts, sizes, np.zeros(len(sizes), np.int64), np.repeat(np.arange(len(chunks)), lengths))
