"""Embeddings as files: an .npz or Parquet file of vectors with paths, labels and any other columns, read or written."""

import zlib
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xbm.errors import InputError
from xbm_app.files import MALFORMED, read_arrays, replacing
from xbm_app.search.catalogue import Entry
from xbm_app.search.filters import OPERATORS, OWN, Value, plain
from xbm_app.search.milvus import AnyCatalogue

SUFFIXES = (".npz", ".parquet")
VECTORS = ("embedding", "embeddings", "vector", "vectors")  # names of the column that is not metadata
PATHS, LABELS = ("path", "paths"), ("label", "labels")
RESERVED = ("id", "ids", "classes")  # ids are the index's own
KINDS = "fiubUSMm"  # of arrays that hold numbers, texts or times
ROWS = 20_000  # read at once
MOST_COLUMNS = 1000  # of metadata; SQLite allows 2,000

Batch = tuple[list[Entry], np.ndarray]  # and (B, D) float32 unit rows


def is_embeddings(source: Path) -> bool:
    """Whether a file holds vectors: every .npz, and a Parquet table with a column of vectors."""
    if source.suffix.lower() == ".npz":
        return source.is_file()
    return source.suffix.lower() == ".parquet" and source.is_file() and _vector_column(_schema(source)) is not None


def read_embeddings(source: Path) -> Iterator[Batch]:
    """Yields the rows of a file in batches, with vectors scaled to unit length.

    A row is known by its path or, without paths, by its number. Other columns of numbers or texts are its metadata.

    Raises:
        InputError: the file cannot be read, or a vector is NaN, infinite or zero.
    """
    read = _read_npz if source.suffix.lower() == ".npz" else _read_parquet
    first = 0
    for columns in read(source):
        name = next(name for name in VECTORS if name in columns)
        vectors = _unit(columns.pop(name), first, source)
        yield _entries(columns, vectors, first, source), vectors
        first += len(vectors)
    if not first:
        raise InputError(f"{source} contains no embeddings: give a file with at least one row")


def _entries(columns: Mapping[str, Any], vectors: np.ndarray, first: int, source: Path) -> list[Entry]:
    paths, labels = (next((columns[name] for name in names if name in columns), None) for names in (PATHS, LABELS))
    classes = columns.get("classes")
    data = metadata_columns({name: values for name, values in columns.items() if name not in (*PATHS, *LABELS, *RESERVED)})
    entries = []
    for row, vector in enumerate(vectors):
        where = f"{source}, row {first + row}"
        path = str(first + row) if paths is None else _text(paths[row], where)
        if not path:
            raise InputError(f"{where}: the path is empty: name the row, or leave the column out")
        label = "" if labels is None else _text(labels[row] if classes is None else _class(classes, labels[row], where), where)
        described = {name: _value(values[row], where) for name, values in data.items()}
        entry = Entry(path, label, len(vector), 0, data=described)
        # the vector and its metadata take the place of the time of a file: other ones are another version of the row
        entries.append(replace(entry, time=zlib.crc32(vector.tobytes(), zlib.crc32(repr(entry.data).encode()))))
    return entries


def _text(value: Any, where: str) -> str:
    """A path or a label, which may be a number or bytes."""
    try:
        text = "" if value is None else value.decode() if isinstance(value, bytes) else str(value)
        text.encode()
    except UnicodeError:
        raise InputError(f"{where}: {value!r} is not UTF-8: write it again") from None
    return text


def _value(value: Any, where: str) -> Value:
    return plain(_text(value, where) if isinstance(value, str | bytes) else value)


def _class(classes: np.ndarray, label: Any, where: str) -> Any:
    """The name of a class, given by its number as `xbm embed` writes it."""
    if classes.ndim != 1 or not isinstance(label, int | np.integer) or not 0 <= label < len(classes):
        raise InputError(f"{where}: the label {label} is not the number of one of the classes: write labels as numbers from 0")
    return classes[label]


def metadata_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns whose names can be used in a filter.

    Raises:
        InputError: two names are the same but for upper and lower case, or there are too many.
    """
    usable = {
        name: values
        for name, values in columns.items()
        if name.strip() and name.isprintable() and name.casefold() not in (*OWN, *RESERVED)
        and not any(sign in name for sign in ('"', *OPERATORS, "!"))
    }  # fmt: skip
    folded = {name.casefold(): name for name in usable}
    for name in usable:
        if folded[name.casefold()] != name:
            raise InputError(
                f"the columns {name!r} and {folded[name.casefold()]!r} differ in upper and lower case only: rename one"
            )
    if len(usable) > MOST_COLUMNS:
        raise InputError(f"there are {len(usable):,} columns of metadata: keep at most {MOST_COLUMNS:,}")
    return usable


def _unit(given: np.ndarray, first: int, source: Path) -> np.ndarray:
    if given.dtype.kind not in "fiub":
        raise InputError(f"{source} must hold vectors of numbers, got {given.dtype}: convert them to float32")
    vectors = given.astype(np.float32, copy=False)
    if vectors.ndim != 2 or vectors.shape[1] == 0:
        raise InputError(
            f"{source} must hold one vector per row, all of the same length, got an array of shape {vectors.shape}"
        )
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unsound = np.flatnonzero(~(np.isfinite(length) & (length > 0))[:, 0])
    if len(unsound):
        raise InputError(
            f"{source}, row {first + unsound[0]}: the vector is zero or not finite: remove the row or embed it again"
        )
    return np.ascontiguousarray(vectors / length)


# ------------------------------------------------------------------ the two formats


def _read_npz(source: Path) -> Iterator[dict[str, Any]]:
    try:
        columns = read_arrays(source)
    except FileNotFoundError:
        raise InputError(f"{source} does not exist: pass an .npz or .parquet file with embeddings") from None
    except (OSError, *MALFORMED) as error:
        raise InputError(f"{source} cannot be read as an .npz file ({error}): write it again") from None
    name = next((name for name in VECTORS if name in columns), None)
    if name is None:
        raise InputError(f"{source} has no array named {', '.join(VECTORS)}, but {', '.join(columns) or 'nothing'}: rename one")
    count = len(columns[name]) if columns[name].ndim else 0
    classes = {"classes": columns["classes"]} if "classes" in columns else {}
    for each in (*PATHS, *LABELS):
        if each in columns and columns[each].shape != (count,):
            raise InputError(f"{source} has {count} vectors, but {each} of shape {columns[each].shape}: give one per vector")
    rows = {each: values for each, values in columns.items() if values.shape == (count,) and values.dtype.kind in KINDS}
    rows = {each: values for each, values in rows.items() if each not in classes} | {name: columns[name]}
    for start in range(0, count, ROWS):
        yield {**{each: values[start : start + ROWS] for each, values in rows.items()}, **classes}


def _schema(source: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            schema, recorded = file.schema_arrow, (file.metadata.metadata or {}).get(b"ARROW:schema")
        if recorded and pyarrow.ipc.read_schema(pyarrow.py_buffer(b64decode(recorded))).names != schema.names:
            raise ValueError("its two lists of columns differ")  # only pages have checksums, names of columns do not
    except FileNotFoundError:
        raise InputError(f"{source} does not exist: pass an .npz or .parquet file with embeddings") from None
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise InputError(f"{source} cannot be read as Parquet ({error}): write it again") from None
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{source} has two columns of the same name: rename one")
    return schema


def _is_shown(field: Any) -> bool:
    """Whether a column is not of bytes, such as those of images."""
    import pyarrow.types as types

    return field.name in (*PATHS, *LABELS) or not (types.is_binary(field.type) or types.is_large_binary(field.type))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _vector_column(schema: Any) -> str | None:
    import pyarrow.types as types

    lists = [field.name for field in schema if _is_list(field.type) and types.is_floating(field.type.value_type)]
    named = [name for name in VECTORS if name in lists]
    return (named or lists or [None])[0]


def _read_parquet(source: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    schema = _schema(source)
    name = _vector_column(schema)
    if name is None:
        raise InputError(f"{source} has no column of vectors (lists of numbers): add one named embedding")
    used = [name, *(field.name for field in schema if not pyarrow.types.is_nested(field.type) and _is_shown(field))]
    try:
        with pyarrow.parquet.ParquetFile(source, page_checksum_verification=True) as file:
            for batch in file.iter_batches(ROWS, columns=used):
                columns: dict[str, Any] = {each: batch.column(each).to_pylist() for each in used if each != name}
                yield {VECTORS[0]: _matrix(batch.column(name), source), **columns}
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{source} cannot be read as Parquet ({error}): write it again") from None


def _matrix(lists: Any, source: Path) -> np.ndarray:
    """(B, D): the rows of a column of lists."""
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    if lists.null_count or not len(lists) or len(flat) % len(lists):
        raise InputError(f"{source}: the vectors are missing or differ in length in some rows: correct the column")
    if not hasattr(lists.type, "list_size") and len({len(row) for row in lists}) > 1:
        raise InputError(f"{source}: the vectors differ in length: correct the column")
    return flat.reshape(len(lists), -1)


# ------------------------------------------------------------------ writing


def write_parquet(catalogue: AnyCatalogue, file: Path) -> int:
    """Writes the rows of an index as a Parquet table that `read_embeddings` and other engines read; returns their number.

    Its columns are `path`, `label`, the metadata, and `embedding`, a list of D float32 numbers. Rows that are boxes in an image
    have a column `box`.
    """
    import pyarrow
    import pyarrow.parquet

    boxes = {known.id: box for (_, box), known in catalogue.known().items()}
    ids, names = np.array(sorted(boxes), np.int64), catalogue.columns()
    chunks = [ids[start : start + ROWS] for start in range(0, len(ids), ROWS)]
    kinds: dict[str, set[type]] = {name: set() for name in names}
    for chunk in chunks if names else ():
        for item in catalogue.items(chunk.tolist()).values():
            for name, value in item.data.items():
                kinds[name].add(type(value))
    fields = {"path": pyarrow.string(), "label": pyarrow.string()}
    fields |= {"box": pyarrow.string()} if any(boxes.values()) else {}
    for name, kind in kinds.items():
        fields[name] = pyarrow.string() if str in kind else pyarrow.float64() if float in kind else pyarrow.int64()
    vectors = pyarrow.list_(pyarrow.float32(), int(catalogue.get("dim")))
    schema = pyarrow.schema([*fields.items(), (VECTORS[0], vectors)])
    with replacing(file) as temporary, pyarrow.parquet.ParquetWriter(temporary, schema, write_page_checksum=True) as writer:
        for chunk in chunks:
            items = catalogue.items(chunk.tolist())
            chosen = [items[image] for image in chunk.tolist()]
            columns: dict[str, Any] = {"path": [item.path for item in chosen], "label": [item.label for item in chosen]}
            if "box" in fields:
                columns["box"] = [boxes[item.id] for item in chosen]
            for name in names:
                columns[name] = pyarrow.array([_cell(item.data.get(name), fields[name]) for item in chosen], fields[name])
            flat = pyarrow.array(catalogue.vectors(chunk).ravel())
            columns[VECTORS[0]] = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.list_size)
            writer.write_table(pyarrow.table(columns, schema=schema))
    return len(ids)


def _cell(value: Value, kind: Any) -> Value:
    """A value of a column that also has texts is one."""
    import pyarrow

    return str(value) if value is not None and pyarrow.types.is_string(kind) else value
