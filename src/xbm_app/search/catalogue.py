"""The format of an index: what it knows about each row, and one SQLite file with the path, label, vector and thumbnail of all.

Everything else in an index can be rebuilt from it. SQLite's journal makes each batch of images appear completely or not at
all, even if the process is killed. An id is never reused, not even for the same image embedded again, so what is derived from
the catalogue can catch up by comparing ids.
"""

import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xbm.errors import InputError
from xbm_app.files import forget_checksum, record_checksum, refuse_special, verify
from xbm_app.search.filters import Column, Columns, Filter, Value, check_columns, sql

FILE = "index.sqlite"
FORMAT = 1
TABLES = (".csv", ".parquet")  # sources that are not folders
IDS_PER_QUERY = 500  # SQLite allows 32,766
HELD_UP = 2  # seconds that a reader with a snapshot waits for a lock

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE images (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, box TEXT NOT NULL, label TEXT NOT NULL,
    size INTEGER NOT NULL, time INTEGER NOT NULL, vector BLOB NOT NULL, UNIQUE (path, box)
);
CREATE INDEX by_label ON images (label, id);
CREATE TABLE thumbnails (id INTEGER PRIMARY KEY, webp BLOB NOT NULL);
"""


# ------------------------------------------------------------------ what an index knows about its rows, in any engine


@dataclass(frozen=True, slots=True)
class Entry:
    """One image, or one box in an image, to be added.

    Attributes:
        path: relative to the root of the source, with forward slashes.
        label: its folder, or the label in the table; may be empty.
        size: bytes of its file.
        time: modification time of its file, in ns.
        data: what else is known about it, by the name of the column.
    """

    path: str
    label: str
    size: int
    time: int
    box: tuple[int, int, int, int] | None = None
    data: Mapping[str, Value] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """What identifies the image: its path and, as text, its box."""
        return self.path, "" if self.box is None else ",".join(map(str, self.box))


class Known(NamedTuple):
    """What the catalogue stores about an image, to tell whether it has changed."""

    id: int
    label: str
    size: int
    time: int


KnownRows = Mapping[tuple[str, str], Known]  # by `Entry.key`


class Item(NamedTuple):
    """An image as a search result shows it."""

    id: int
    path: str
    label: str
    data: dict[str, Value] = {}  # noqa: RUF012


# ------------------------------------------------------------------ the index in a folder


class Catalogue:
    """An open catalogue. It may be shared between threads.

    Writers use SQLite's write-ahead log, so a reader that holds a snapshot neither waits for them nor makes them wait.
    """

    folder: Path

    def __init__(self, folder: Path, write: bool = False) -> None:
        self.folder, self._lock = Path(folder), threading.RLock()
        self._columns, self._column_ids, self._columns_of = Columns(), np.empty(0, np.int64), (-1, -1)
        file = self.folder / FILE
        if not write and not file.is_file():
            raise InputError(f"{folder} is not an index: make one with `xbm index RUN IMAGES --out {folder}`")
        for each in (file, *(file.with_name(f"{FILE}-{kind}") for kind in ("wal", "shm", "journal"))):
            if write or each != file:  # SQLite follows links, and changes what it finds
                refuse_special(each)
        verify(file, remedy=f"delete {folder} and run `xbm index` again")
        if write:
            forget_checksum(file)
        try:
            # Readers need write access too: whoever opens the file next rolls back what a killed writer left unfinished.
            self._database = _connect(file)
            if not self._database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                if not write:
                    raise InputError(f"{folder} contains an index without any content: run `xbm index` again")
                self._database.executescript(f"BEGIN; {SCHEMA} INSERT INTO meta VALUES ('format', '{FORMAT}'); COMMIT;")
            if write:
                self._database.execute("PRAGMA journal_mode = WAL")
            version = self.get("format")
        except sqlite3.DatabaseError as error:
            raise InputError(f"{file} cannot be read ({error}): delete {folder} and run `xbm index` again") from None
        if version != FORMAT:
            raise InputError(f"{folder} has format {version}, this version reads format {FORMAT}: rebuild it with `xbm index`")

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def seal(self) -> None:
        """Moves everything from the write-ahead log into the file and records its checksum, unless somebody still reads an
        earlier content; then that reader does it later, in `settle`."""
        file = self.folder / FILE
        forget_checksum(file)
        with self._lock:
            self._database.execute("PRAGMA busy_timeout = 0")
            busy, *_ = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not busy:
            record_checksum(file)

    @contextmanager
    def change(self) -> Iterator[None]:
        """A transaction: all changes inside are made, or none.

        Raises:
            InputError: the disk is full or not writable; the index is unchanged.
        """
        with self._lock:
            try:
                self._begin()
                before = self._database.total_changes
                yield
                if self._database.total_changes > before:
                    self.set("revision", secrets.token_hex(8))
                self._database.execute("COMMIT")
            except BaseException as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                self._columns_of = (-1, -1)  # a column that was read inside has what is gone now
                if not isinstance(error, sqlite3.OperationalError):
                    raise
                raise InputError(
                    f"could not write to {self.folder} ({error}); the index is unchanged: free some space and run it again"
                ) from None

    def _begin(self) -> None:
        """Begins to write. After a kill, the next reader moves the log into the file, which has no checksum then."""
        self._database.execute("BEGIN IMMEDIATE")
        forget_checksum(self.folder / FILE)  # again and only now: until here, a reader may have recorded one in `settle`

    # ------------------------------------------------------------------ while others write

    def hold(self) -> None:
        """From here on reads the content of this moment, whatever others write or delete, if the file can be written to."""
        with self._lock:
            self._database.execute(f"PRAGMA busy_timeout = {1000 * HELD_UP}")
            with suppress(sqlite3.OperationalError):  # not writable: read as it is
                if self._database.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",):
                    self._database.execute("BEGIN")
            self._inode, self._settled = self._file_number(), False
            self.get("revision")  # the snapshot is that of the first statement

    @property
    def complete(self) -> bool:
        """Whether the last update went on to its end."""
        return bool(self.get("revision") == self.get("published"))

    def publish(self) -> None:
        """States that an update is complete: servers switch to it."""
        if not self.complete:
            self.set("published", self.get("revision"))

    def replaced(self) -> bool:
        """Whether the file has a complete content other than the one that is held."""
        number = self._file_number()  # fails if there is no file, which connecting would create
        with closing(_connect(self.folder / FILE)) as now:  # a Catalogue would read and verify the whole file, every second
            meta = {key: json.loads(value) for key, value in now.execute("SELECT key, value FROM meta")}
        changed = number != self._inode or meta.get("published") != self.get("published")
        return changed and meta.get("revision") == meta.get("published")

    def settle(self) -> None:
        """Empties the write-ahead log, which would otherwise grow by every update while somebody reads. Changes no content."""
        if self._settled or not self._database.in_transaction:
            return
        with closing(_connect(self.folder / FILE)) as writer, self._lock, suppress(sqlite3.OperationalError):
            writer.execute("PRAGMA busy_timeout = 0")
            writer.execute("BEGIN IMMEDIATE")  # nobody can write now
            now = writer.execute("SELECT value FROM meta WHERE key = 'revision'").fetchone()
            if self._row("SELECT value FROM meta WHERE key = ?", ("revision",)) != now:
                return
            self._database.execute("COMMIT")
            try:
                _, logged, moved = self._database.execute("PRAGMA wal_checkpoint").fetchone()
                self._settled = logged == moved  # not if another process reads an older content
                if self._settled:
                    record_checksum(self.folder / FILE)
            finally:
                self._database.execute("BEGIN")
                self.get("revision")

    def _file_number(self) -> int:
        return (self.folder / FILE).stat().st_ino

    # ------------------------------------------------------------------ the index as a whole

    def get(self, key: str, default: Any = None) -> Any:
        row = self._row("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(row[0]) if row else default

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            alone = not self._database.in_transaction
            if alone:
                self._begin()
            try:
                self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))
            finally:
                if alone:
                    self._database.execute("COMMIT")

    def __len__(self) -> int:
        return int(self._rows("SELECT count(*) FROM images")[0][0])

    def keep_model(self, digest: str, write: Callable[[Path], None]) -> None:
        """Stores the weights that produce the vectors, as `write` writes them to a file, in place of earlier ones."""
        kept = self._model_path(digest)
        write(kept)
        for stale in self.folder.glob("model-*.pt"):
            if stale != kept:
                stale.unlink()

    @contextmanager
    def model_file(self, digest: str) -> Iterator[Path]:
        """The weights, as a file that exists for a while."""
        yield self._model_path(digest)

    def is_model(self, file: Path, digest: str) -> bool:
        """Whether a model was loaded from the weights that are stored here."""
        return file == self._model_path(digest)

    def _model_path(self, digest: str) -> Path:
        return self.folder / f"model-{digest}.pt"

    # ------------------------------------------------------------------ writing, inside `change`

    def add(
        self, entries: Sequence[Entry], vectors: np.ndarray, thumbnails: Sequence[bytes], known: KnownRows | None = None
    ) -> None:
        """Adds images. An image with the same path and box is replaced and gets a new id.

        Args:
            vectors: (B, D) unit rows.
            known: the images of the index, if the caller knows them.
        """
        described: list[tuple[int, Mapping[str, Value]]] = []
        for entry, vector, webp in zip(entries, np.ascontiguousarray(vectors, "<f4"), thumbnails, strict=True):
            if known is None or entry.key in known:
                self.discard(entry.key)
            values = (*entry.key, entry.label, entry.size, entry.time, vector.tobytes())
            row = self._database.execute(
                "INSERT INTO images (path, box, label, size, time, vector) VALUES (?, ?, ?, ?, ?, ?)", values
            )
            if webp:
                self._database.execute("INSERT INTO thumbnails VALUES (?, ?)", (row.lastrowid, webp))
            if entry.data:
                described.append((int(row.lastrowid or 0), entry.data))
        self.describe(described)

    def remove(self, ids: Iterable[int]) -> None:
        rows = [(int(image),) for image in ids]
        self._database.executemany("DELETE FROM images WHERE id = ?", rows)
        self._database.executemany("DELETE FROM thumbnails WHERE id = ?", rows)
        if self.columns():
            self._database.executemany("DELETE FROM metadata WHERE id = ?", rows)

    def discard(self, key: tuple[str, str]) -> None:
        """Removes the image with this path and box, if there is one."""
        image = self.find(key)
        self.remove([] if image is None else [image])

    def relabel(self, labels: Iterable[tuple[int, str]]) -> None:
        self._database.executemany("UPDATE images SET label = ? WHERE id = ?", [(label, image) for image, label in labels])

    def describe(self, rows: Sequence[tuple[int, Mapping[str, Value]]]) -> None:
        """Sets the metadata of some images. Its columns are made when they first occur, each with an index for filters."""
        columns = self.columns()
        for name in dict.fromkeys(name for _, data in rows for name in data):
            if name not in columns:
                if not columns:
                    self._database.execute("CREATE TABLE metadata (id INTEGER PRIMARY KEY)")
                self._database.execute(f'ALTER TABLE metadata ADD COLUMN "{name}"')
                self._database.execute(f'CREATE INDEX "by_{name}" ON metadata ("{name}", id)')
                columns = [*columns, name]
        if rows:
            places = ",".join("?" * (len(columns) + 1))
            values = [(image, *(data.get(name) for name in columns)) for image, data in rows]
            self._database.executemany(f"INSERT OR REPLACE INTO metadata VALUES ({places})", values)

    # ------------------------------------------------------------------ reading

    def known(self) -> KnownRows:
        """All images by path and box."""
        rows = self._rows("SELECT path, box, id, label, size, time FROM images")
        return {(path, box): Known(*rest) for path, box, *rest in rows}

    def columns(self) -> list[str]:
        """The names of the metadata's columns."""
        return [name for (name,) in self._rows("SELECT name FROM pragma_table_info('metadata') WHERE cid > 0")]

    def ids(self, filters: Sequence[Filter] = ()) -> np.ndarray:
        """(N,) int64, increasing: all, or those that meet every filter.

        Raises:
            InputError: a filter on a column that does not exist.
        """
        columns = self.columns() if filters else []
        check_columns(filters, columns)
        if not any(each.column in columns for each in filters):
            return self._ids_by_sql(filters, False)
        with self._one_content():
            kept = {each.column: self._column(each.column) for each in filters if each.column in columns}
            by_sql = [each for each in filters if kept.get(each.column) is None]
            met = [column.meets(each) for each in filters if (column := kept.get(each.column)) is not None]
            if not met:
                return self._ids_by_sql(filters, True)
            rows = np.logical_and.reduce(met)
            if not by_sql:
                return self._column_ids[rows]
            some = self._ids_by_sql(by_sql, any(each.column in columns for each in by_sql))
            return some[rows[np.searchsorted(self._column_ids, some)]]

    def _ids_by_sql(self, filters: Sequence[Filter], joined: bool) -> np.ndarray:
        conditions = [sql(each) for each in filters]
        source = "images i LEFT JOIN metadata m ON m.id = i.id" if joined else "images i"
        where = f" WHERE {' AND '.join(text for text, _ in conditions)}" if filters else ""
        values = [value for _, some in conditions for value in some]
        return np.array(self._rows(f"SELECT i.id FROM {source}{where} ORDER BY i.id", values), np.int64).reshape(-1)

    def _column(self, name: str) -> Column | None:
        """A column of the metadata in memory, with the rows `_column_ids`; None if it is too large. Inside `_one_content`."""
        content = (self._rows("PRAGMA data_version")[0][0], self._database.total_changes)  # of other connections; of this one
        if content != self._columns_of:
            self._columns, self._column_ids, self._columns_of = Columns(), self._ids_by_sql((), False), content

        def read() -> Iterator[Value]:
            rows = f'SELECT m."{name}" FROM images i LEFT JOIN metadata m ON m.id = i.id ORDER BY i.id'
            return (value for (value,) in self._database.execute(rows))

        return self._columns.get(name, read)

    @contextmanager
    def _one_content(self) -> Iterator[None]:
        """What is read inside is of one content, as with `hold`."""
        with self._lock:
            begun = not self._database.in_transaction
            if begun:
                self._database.execute("BEGIN")
            try:
                yield
            finally:
                if begun and self._database.in_transaction:
                    self._database.execute("COMMIT")

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """(len(ids), D) float32, in the order of the ids; zeros for images that are no longer in the index."""
        by_id = dict(self._rows_of("SELECT id, vector FROM images WHERE id IN", ids))
        dim = self.get("dim")
        zeros = bytes(4 * dim)
        joined = b"".join(by_id.get(image, zeros) for image in ids.tolist())
        return np.frombuffer(joined, "<f4").reshape(len(ids), dim).astype(np.float32, copy=False)

    def items(self, ids: Sequence[int]) -> dict[int, Item]:
        """Path, label and metadata of some images; those that are not in the index are left out."""
        columns, data = self.columns(), dict[int, dict[str, Value]]()
        for image, *values in self._rows_of("SELECT * FROM metadata WHERE id IN", ids) if columns else ():
            data[image] = {name: value for name, value in zip(columns, values) if value is not None}
        rows = self._rows_of("SELECT id, path, label FROM images WHERE id IN", ids)
        return {image: Item(image, path, label, data.get(image, {})) for image, path, label in rows}

    def key_of(self, image: int) -> tuple[str, str] | None:
        """Path and box of an image, which identify it in every index of the same source."""
        return self._row("SELECT path, box FROM images WHERE id = ?", (image,))

    def find(self, key: tuple[str, str]) -> int | None:
        """The id of the image with this path and box."""
        row = self._row("SELECT id FROM images WHERE path = ? AND box = ?", key)
        return row[0] if row else None

    def thumbnail(self, image: int) -> bytes | None:
        """A small version of the image, as WebP."""
        row = self._row("SELECT webp FROM thumbnails WHERE id = ?", (image,))
        return row[0] if row else None

    def labels(self) -> list[tuple[str, int]]:
        """(label, number of images) for each label that is not empty."""
        return self._rows("SELECT label, count(*) FROM images WHERE label != '' GROUP BY label ORDER BY label")

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._database.execute(query, tuple(values)).fetchall()

    def _row(self, query: str, values: Sequence[Any]) -> Any:
        rows = self._rows(query, values)
        return rows[0] if rows else None

    def _rows_of(self, query: str, ids: Sequence[int] | np.ndarray) -> Iterator[Any]:
        plain = [int(image) for image in ids]
        for start in range(0, len(plain), IDS_PER_QUERY):
            chunk = plain[start : start + IDS_PER_QUERY]
            yield from self._rows(f"{query} ({','.join('?' * len(chunk))})", chunk)


def _connect(file: Path) -> sqlite3.Connection:
    """Opens the file, also in a folder that cannot be written to."""
    database = sqlite3.connect(file, timeout=30, check_same_thread=False, isolation_level=None)
    if file.is_file() and not os.access(file.parent, os.W_OK):
        try:
            database.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:  # a write-ahead log needs a file beside it
            database.close()
            uri = f"{file.absolute().as_uri()}?immutable=1"
            return sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
    return database


def root_of(source: Path) -> Path:
    """The folder that the paths of a source, a folder or a table, are relative to."""
    return source.parent if source.suffix.lower() in TABLES and not source.is_dir() else source
