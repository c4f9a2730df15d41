"""The catalogue of an index: one SQLite file with every image's path, label, vector and thumbnail.

It is the truth; everything else in an index can be made from it. SQLite's journal makes a batch of images appear whole or
not at all, whenever the process is killed. An id is never used twice, not even for the same image embedded anew: what an id
stands for never changes.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xbm.errors import InputError
from xbm_app.search.sources import Entry

FILE = "index.sqlite"
FORMAT = 1
AT_ONCE = 500  # ids in one question; SQLite takes 32,766

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE images (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, box TEXT NOT NULL, label TEXT NOT NULL,
    size INTEGER NOT NULL, time INTEGER NOT NULL, vector BLOB NOT NULL, UNIQUE (path, box)
);
CREATE INDEX by_label ON images (label, id);
CREATE TABLE thumbnails (id INTEGER PRIMARY KEY, webp BLOB NOT NULL);
"""


class Known(NamedTuple):
    """What the catalogue says about an image it holds."""

    id: int
    label: str
    size: int
    time: int


class Item(NamedTuple):
    """An image as a search shows it."""

    id: int
    path: str
    label: str


class Catalogue:
    """An open catalogue. Threads may share it: they take turns."""

    def __init__(self, folder: Path, write: bool = False) -> None:
        self.folder, self._lock = Path(folder), threading.RLock()
        file = self.folder / FILE
        if not write and not file.is_file():
            raise InputError(f"{folder} is no index: make one with `xbm index RUN IMAGES --out {folder}`")
        try:
            # Readers may write too: what a killed writer left half done is rolled back by whoever opens the file next.
            self._database = sqlite3.connect(file, timeout=30, check_same_thread=False, isolation_level=None)
            if not self._database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                if not write:
                    raise InputError(f"{folder} holds an index that was never begun: run `xbm index` again")
                self._database.executescript(f"BEGIN; {SCHEMA} INSERT INTO meta VALUES ('format', '{FORMAT}'); COMMIT;")
            version = self.get("format")
        except sqlite3.DatabaseError as error:
            raise InputError(f"{file} cannot be read ({error}): delete {folder} and run `xbm index` again") from None
        if version != FORMAT:
            raise InputError(f"{folder} has format {version}, this version reads {FORMAT}: make it anew with `xbm index`")

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Everything inside happens, or nothing does.

        Raises:
            InputError: the disk is full or not writable; the index is as it was before.
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
                told = f"could not write to {self.folder} ({error}); what is there is unharmed: make room and run it again"
                raise InputError(told) from None

    # ------------------------------------------------------------------ about the index as a whole

    def get(self, key: str, default: Any = None) -> Any:
        row = self._ask("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(row[0][0]) if row else default

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def __len__(self) -> int:
        return int(self._ask("SELECT count(*) FROM images")[0][0])

    # ------------------------------------------------------------------ writing, inside `change`

    def add(self, entries: Sequence[Entry], vectors: np.ndarray, thumbnails: Sequence[bytes]) -> None:
        """Adds images; one that is there already, by path and box, is replaced and gets a new id.

        Args:
            vectors: (B, D) unit rows.
        """
        for entry, vector, webp in zip(entries, np.ascontiguousarray(vectors, "<f4"), thumbnails, strict=True):
            path, box = entry.key
            self.remove([row[0] for row in self._ask("SELECT id FROM images WHERE path = ? AND box = ?", (path, box))])
            values = (path, box, entry.label, entry.size, entry.time, vector.tobytes())
            row = self._database.execute(
                "INSERT INTO images (path, box, label, size, time, vector) VALUES (?, ?, ?, ?, ?, ?)", values
            )
            if webp:
                self._database.execute("INSERT INTO thumbnails VALUES (?, ?)", (row.lastrowid, webp))

    def remove(self, ids: Iterable[int]) -> None:
        rows = [(int(each),) for each in ids]
        self._database.executemany("DELETE FROM images WHERE id = ?", rows)
        self._database.executemany("DELETE FROM thumbnails WHERE id = ?", rows)

    def relabel(self, labels: Iterable[tuple[int, str]]) -> None:
        self._database.executemany("UPDATE images SET label = ? WHERE id = ?", [(label, each) for each, label in labels])

    # ------------------------------------------------------------------ reading

    def known(self) -> dict[tuple[str, str], Known]:
        """Every image by its path and box."""
        rows = self._ask("SELECT path, box, id, label, size, time FROM images")
        return {(path, box): Known(*rest) for path, box, *rest in rows}

    def ids(self, label: str | None = None) -> np.ndarray:
        """(N,) int64, in order: all, or those of a label."""
        where, values = ("", ()) if label is None else (" WHERE label = ?", (label,))
        return np.array(self._ask(f"SELECT id FROM images{where} ORDER BY id", values), np.int64).reshape(-1)

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """(len(ids), D) float32, in the order of the ids; those that have left the index meanwhile are rows of zeros."""
        found = dict(self._rows("SELECT id, vector FROM images WHERE id IN", ids))
        dim = self.get("dim")
        zeros = bytes(4 * dim)
        joined = b"".join(found.get(each, zeros) for each in ids.tolist())
        return np.frombuffer(joined, "<f4").reshape(len(ids), dim).astype(np.float32, copy=False)

    def items(self, ids: Sequence[int]) -> dict[int, Item]:
        """Path and label of some images; those that are not there (any more) are left out."""
        return {row[0]: Item(*row) for row in self._rows("SELECT id, path, label FROM images WHERE id IN", ids)}

    def key_of(self, image: int) -> tuple[str, str] | None:
        """Path and box of an image: what it is called in every index of the same source."""
        row = self._ask("SELECT path, box FROM images WHERE id = ?", (image,))
        return (row[0][0], row[0][1]) if row else None

    def find(self, key: tuple[str, str]) -> int | None:
        """The id of a path and box."""
        row = self._ask("SELECT id FROM images WHERE path = ? AND box = ?", key)
        return int(row[0][0]) if row else None

    def thumbnail(self, image: int) -> bytes | None:
        """The image made small, as WebP."""
        row = self._ask("SELECT webp FROM thumbnails WHERE id = ?", (image,))
        return bytes(row[0][0]) if row else None

    def labels(self) -> list[tuple[str, int]]:
        """Every label with how many images have it, the empty one left out."""
        return self._ask("SELECT label, count(*) FROM images WHERE label != '' GROUP BY label ORDER BY label")

    def _ask(self, question: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._database.execute(question, tuple(values)).fetchall()

    def _rows(self, question: str, ids: Sequence[int] | np.ndarray) -> Iterator[Any]:
        plain = [int(each) for each in ids]
        for start in range(0, len(plain), AT_ONCE):
            some = plain[start : start + AT_ONCE]
            yield from self._ask(f"{question} ({','.join('?' * len(some))})", some)
