"""The format of an index: one SQLite file with the path, label, vector and thumbnail of every image.

Everything else in an index can be rebuilt from it. SQLite's journal makes each batch of images appear completely or not at
all, even if the process is killed. An id is never reused, not even for the same image embedded again, so what is derived from
the catalogue can catch up by comparing ids.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xbm.errors import InputError

FILE = "index.sqlite"
FORMAT = 1
TABLES = (".csv", ".parquet")  # sources that are not folders
IDS_PER_QUERY = 500  # SQLite allows 32,766

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE images (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, box TEXT NOT NULL, label TEXT NOT NULL,
    size INTEGER NOT NULL, time INTEGER NOT NULL, vector BLOB NOT NULL, UNIQUE (path, box)
);
CREATE INDEX by_label ON images (label, id);
CREATE TABLE thumbnails (id INTEGER PRIMARY KEY, webp BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One image, or one box in an image, to be added.

    Attributes:
        path: relative to the root of the source, with forward slashes.
        label: its folder, or the label in the table; may be empty.
        size: bytes of its file.
        time: modification time of its file, in ns.
    """

    path: str
    label: str
    size: int
    time: int
    box: tuple[int, int, int, int] | None = None

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


class Item(NamedTuple):
    """An image as a search result shows it."""

    id: int
    path: str
    label: str


class Catalogue:
    """An open catalogue. It may be shared between threads."""

    def __init__(self, folder: Path, write: bool = False) -> None:
        self.folder, self._lock = Path(folder), threading.RLock()
        file = self.folder / FILE
        if not write and not file.is_file():
            raise InputError(f"{folder} is not an index: make one with `xbm index RUN IMAGES --out {folder}`")
        try:
            # Readers need write access too: whoever opens the file next rolls back what a killed writer left unfinished.
            self._database = sqlite3.connect(file, timeout=30, check_same_thread=False, isolation_level=None)
            if not self._database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                if not write:
                    raise InputError(f"{folder} contains an index without any content: run `xbm index` again")
                self._database.executescript(f"BEGIN; {SCHEMA} INSERT INTO meta VALUES ('format', '{FORMAT}'); COMMIT;")
            version = self.get("format")
        except sqlite3.DatabaseError as error:
            raise InputError(f"{file} cannot be read ({error}): delete {folder} and run `xbm index` again") from None
        if version != FORMAT:
            raise InputError(f"{folder} has format {version}, this version reads format {FORMAT}: rebuild it with `xbm index`")

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """A transaction: all changes inside are made, or none.

        Raises:
            InputError: the disk is full or not writable; the index is unchanged.
        """
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                yield
                self._database.execute("COMMIT")
            except BaseException as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                if not isinstance(error, sqlite3.OperationalError):
                    raise
                raise InputError(
                    f"could not write to {self.folder} ({error}); the index is unchanged: free some space and run it again"
                ) from None

    # ------------------------------------------------------------------ the index as a whole

    def get(self, key: str, default: Any = None) -> Any:
        row = self._row("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(row[0]) if row else default

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def __len__(self) -> int:
        return int(self._rows("SELECT count(*) FROM images")[0][0])

    # ------------------------------------------------------------------ writing, inside `change`

    def add(self, entries: Sequence[Entry], vectors: np.ndarray, thumbnails: Sequence[bytes]) -> None:
        """Adds images. An image with the same path and box is replaced and gets a new id.

        Args:
            vectors: (B, D) unit rows.
        """
        for entry, vector, webp in zip(entries, np.ascontiguousarray(vectors, "<f4"), thumbnails, strict=True):
            self.discard(entry.key)
            values = (*entry.key, entry.label, entry.size, entry.time, vector.tobytes())
            row = self._database.execute(
                "INSERT INTO images (path, box, label, size, time, vector) VALUES (?, ?, ?, ?, ?, ?)", values
            )
            if webp:
                self._database.execute("INSERT INTO thumbnails VALUES (?, ?)", (row.lastrowid, webp))

    def remove(self, ids: Iterable[int]) -> None:
        rows = [(int(image),) for image in ids]
        self._database.executemany("DELETE FROM images WHERE id = ?", rows)
        self._database.executemany("DELETE FROM thumbnails WHERE id = ?", rows)

    def discard(self, key: tuple[str, str]) -> None:
        """Removes the image with this path and box, if there is one."""
        image = self.find(key)
        self.remove([] if image is None else [image])

    def relabel(self, labels: Iterable[tuple[int, str]]) -> None:
        self._database.executemany("UPDATE images SET label = ? WHERE id = ?", [(label, image) for image, label in labels])

    # ------------------------------------------------------------------ reading

    def known(self) -> dict[tuple[str, str], Known]:
        """All images by path and box."""
        rows = self._rows("SELECT path, box, id, label, size, time FROM images")
        return {(path, box): Known(*rest) for path, box, *rest in rows}

    def ids(self, label: str | None = None) -> np.ndarray:
        """(N,) int64, increasing: all, or those with a label."""
        where, values = ("", ()) if label is None else (" WHERE label = ?", (label,))
        return np.array(self._rows(f"SELECT id FROM images{where} ORDER BY id", values), np.int64).reshape(-1)

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """(len(ids), D) float32, in the order of the ids; zeros for images that are no longer in the index."""
        by_id = dict(self._rows_of("SELECT id, vector FROM images WHERE id IN", ids))
        dim = self.get("dim")
        zeros = bytes(4 * dim)
        joined = b"".join(by_id.get(image, zeros) for image in ids.tolist())
        return np.frombuffer(joined, "<f4").reshape(len(ids), dim).astype(np.float32, copy=False)

    def items(self, ids: Sequence[int]) -> dict[int, Item]:
        """Path and label of some images; those that are not in the index are left out."""
        return {row[0]: Item(*row) for row in self._rows_of("SELECT id, path, label FROM images WHERE id IN", ids)}

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


def root_of(source: Path) -> Path:
    """The folder that the paths of a source, a folder or a table, are relative to."""
    return source.parent if source.suffix.lower() in TABLES and not source.is_dir() else source


def model_file(folder: Path, digest: str) -> Path:
    """Where an index keeps the weights that produced its vectors."""
    return folder / f"model-{digest}.pt"
