"""An index kept by Milvus instead of a folder: the same rows, searched by an engine that many machines can share.

`milvus:./photos.db` is an embedded engine in one file (milvus-lite), `milvus:http://host:19530` a server or a cluster. A name
after # is that of the collection. Rows are as in `xbm_app.search.catalogue`; a second, small collection holds the facts about
the index and the weights of its model, so that any machine can search it. Milvus has no transactions: an update that is killed
leaves whole batches, and the next one continues.
"""

import base64
import json
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from xbm.errors import InputError, XbmError
from xbm_app.extras import require
from xbm_app.search.catalogue import Catalogue, Entry, Item, Known, KnownRows
from xbm_app.search.filters import Filter, Value, check_columns, expression

PREFIX = "milvus:"
SECONDS = 10  # for an answer of the engine
PAGE = 10_000  # rows per query; Milvus allows 16,384
FEW = 2_000  # rows that meet a filter up to which all of them are compared
INSERTED = 4_000_000  # bytes of vectors and thumbnails per insertion; Milvus accepts messages of 64 MB
TEXT = 65_535  # bytes of the longest text in Milvus
PIECE = 48_000  # bytes of weights per row, less than TEXT in base64
FLUSHED = 600  # seconds that an engine may take to index what was added
FIELDS = ["path", "box", "label", "size", "time"]
SHOWN = ["id", "path", "label", "data"]

# ------------------------------------------------------------------ the connection


class UnavailableError(XbmError):
    """The engine that keeps an index does not answer; a later call may succeed."""


class MilvusConnection:
    """Collections of one name at one address: the rows of an index, and the facts about it. It may be shared between threads.

    Its client connects again after a loss, which is raised as `UnavailableError`.

    Args:
        where: `milvus:FILE.db` or `milvus:http://HOST:PORT`, each with `#NAME` if the collection is not `xbm`.
        write: whether the file may be created.
    """

    def __init__(self, where: str, write: bool) -> None:
        require("milvus", "pymilvus")
        import pymilvus.client.iterator.query_iterator  # noqa: F401  sets levels of its own

        for quiet in ("pymilvus", "pymilvus.client.iterator.query_iterator", "grpc._server"):  # what matters is raised
            logging.getLogger(quiet).setLevel(logging.CRITICAL)
        self.folder = where  # as messages name it
        address, _, name = where.removeprefix(PREFIX).partition("#")
        self.name = name or "xbm"
        if not address or not self.name.isidentifier():
            raise InputError(
                f"{where} names no engine: write milvus:FILE.db or milvus:http://HOST:PORT, and #NAME for a collection"
            )
        if not write and "://" not in address and not Path(address).exists():
            raise InputError(f"{address} does not exist: make an index with `xbm index RUN IMAGES --to {where}`")
        self._address, self._lock = address, threading.RLock()
        self._connected: Any = None  # the client, while the engine answers

    @property
    def _facts(self) -> str:
        return f"{self.name}_facts"

    @property
    def _client(self) -> Any:
        """The client; connects if need be, also again after a loss."""
        from pymilvus import MilvusClient

        with self._lock:
            if self._connected is None:
                client = MilvusClient(self._address, token=os.environ.get("MILVUS_TOKEN", ""), timeout=SECONDS)
                for name in (self._facts, self.name):
                    if client.has_collection(name):
                        client.load_collection(name)  # an engine that was started again has not loaded it
                self._connected = client
            return self._connected

    def close(self) -> None:
        with self._lock:
            client, self._connected = self._connected, None
        if client is not None:
            with suppress(Exception):  # which may be the loss itself
                client.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Raises what goes wrong between here and the engine as `UnavailableError`; the next call connects again."""
        from grpc import RpcError
        from pymilvus.exceptions import MilvusException

        try:
            yield
        except (MilvusException, RpcError, OSError) as error:
            self.close()
            reason = str(getattr(error, "message", error)).splitlines()[0][:200]
            raise UnavailableError(f"{self.folder} does not answer ({reason}): see whether the engine is running") from error


# ------------------------------------------------------------------ the index


class MilvusCatalogue(MilvusConnection):
    """An index in Milvus, with the methods of `Catalogue`."""

    def __init__(self, where: str, write: bool = False) -> None:
        super().__init__(where, write)
        with self._asking():
            if not self._client.has_collection(self._facts):
                if not write:
                    raise InputError(f"{where} has no index: make one with `xbm index RUN IMAGES --to {where}`")
                self._make_facts()
        self._published = self.get("published")

    @contextmanager
    def change(self) -> Iterator[None]:
        """Where the embedded index has a transaction."""
        yield

    # ------------------------------------------------------------------ while others write

    def hold(self) -> None:
        """Milvus has one content for everybody; only what was read at the start is kept."""

    @property
    def complete(self) -> bool:
        return True

    def build(self) -> None:
        """Has the engine index the rows that were added: until then it compares each with every query."""
        if self.get("dim") is not None:
            with self._asking():
                self._client.flush(self.name, timeout=FLUSHED)

    def publish(self) -> None:
        """States that an update is complete: servers look at what has changed."""
        self.set("published", secrets.token_hex(8))

    def replaced(self) -> bool:
        """Whether there has been an update since the index was opened."""
        return bool(self.get("published") != self._published)

    def settle(self) -> None:
        """There is nothing to clean up."""

    # ------------------------------------------------------------------ the index as a whole

    def get(self, key: str, default: Any = None) -> Any:
        with self._asking():
            rows = self._client.get(self._facts, [key], output_fields=["value"])
        return json.loads(rows[0]["value"]) if rows else default

    def set(self, key: str, value: Any) -> None:
        with self._asking():
            self._client.upsert(self._facts, [{"key": key, "value": json.dumps(value), "unused": [0.0, 0.0]}])
            if key == "dim" and value is not None and not self._client.has_collection(self.name):
                self._make_rows(int(value))

    def __len__(self) -> int:
        return self.count()

    def count(self, filters: Sequence[Filter] = ()) -> int:
        """How many rows meet every filter."""
        if self.get("dim") is None:
            return 0
        with self._asking():
            return int(self._client.query(self.name, filter=self._where(filters), output_fields=["count(*)"])[0]["count(*)"])

    def keep_model(self, digest: str, write: Callable[[Path], None]) -> None:
        """Stores the weights that produce the vectors, as `write` writes them to a file, in place of earlier ones."""
        with tempfile.TemporaryDirectory() as folder:
            write(file := Path(folder) / "model.pt")
            content = file.read_bytes()
        old = self.get("model_pieces", 0)
        pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
        with self._asking():
            for start in range(0, len(pieces), 100):
                rows = [
                    {"key": f"model/{k}", "value": base64.b64encode(pieces[k]).decode(), "unused": [0.0, 0.0]}
                    for k in range(start, min(start + 100, len(pieces)))
                ]
                self._client.upsert(self._facts, rows)
            if old > len(pieces):
                self._client.delete(self._facts, [f"model/{k}" for k in range(len(pieces), old)])
        self.set("model_pieces", len(pieces))

    def is_model(self, file: Path, digest: str) -> bool:
        """Whether a model was loaded from the weights that are stored here."""
        return file.name == f"model-{digest}.pt"

    @contextmanager
    def model_file(self, digest: str) -> Iterator[Path]:
        """The weights, as a file that exists for a while."""
        names, found = [f"model/{k}" for k in range(self.get("model_pieces", 0))], {}
        with self._asking():
            for start in range(0, len(names), 100):
                for row in self._client.get(self._facts, names[start : start + 100], output_fields=["key", "value"]):
                    found[row["key"]] = base64.b64decode(row["value"])
        if not names or len(found) < len(names):
            raise InputError(f"{self.folder} lacks a part of its model: run `xbm index` again")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"model-{digest}.pt"
            file.write_bytes(b"".join(found[name] for name in names))
            yield file

    # ------------------------------------------------------------------ writing

    def add(
        self, entries: Sequence[Entry], vectors: np.ndarray, thumbnails: Sequence[bytes], known: KnownRows | None = None
    ) -> None:
        """Adds images. An image with the same path and box is replaced and gets a new id.

        Args:
            known: the images of the index, if the caller knows them: to look for them takes longer the more there are.
        """
        rows = [
            {
                "path": entry.path, "box": entry.key[1], "label": entry.label, "size": entry.size, "time": entry.time,
                "vector": vector.tolist(), "thumbnail": _text(webp), "data": _present(entry.data),
            }
            for entry, vector, webp in zip(entries, np.asarray(vectors, np.float32), thumbnails, strict=True)
        ]  # fmt: skip
        self._note_columns(name for entry in entries for name in entry.data)
        step = max(1, INSERTED // (4 * vectors.shape[1] + max(map(len, thumbnails), default=0) + 1000)) if rows else 1
        with self._asking():
            for start in range(0, len(rows), step):
                self._discard(entries[start : start + step], known)
                self._client.insert(self.name, rows[start : start + step])

    def _discard(self, entries: Sequence[Entry], known: KnownRows | None) -> None:
        """Removes earlier rows of the same images."""
        keys = {entry.key for entry in entries}
        if known is None:
            paths = json.dumps([entry.path for entry in entries])
            old = self._client.query(self.name, filter=f"path in {paths}", output_fields=["id", "path", "box"])
            ids = [row["id"] for row in old if (row["path"], row["box"]) in keys]
        else:
            ids = [known[key].id for key in keys & known.keys()]
        if ids:
            self._client.delete(self.name, ids)

    def remove(self, ids: Iterable[int]) -> None:
        rows = [int(image) for image in ids]
        with self._asking():
            for start in range(0, len(rows), PAGE):
                self._client.delete(self.name, rows[start : start + PAGE])

    def discard(self, key: tuple[str, str]) -> None:
        """Removes the image with this path and box, if there is one."""
        image = self.find(key)
        self.remove([] if image is None else [image])

    def relabel(self, labels: Iterable[tuple[int, str]]) -> None:
        self._rewrite({image: {"label": label} for image, label in labels})

    def describe(self, rows: Sequence[tuple[int, Mapping[str, Value]]]) -> None:
        """Sets the metadata of some images."""
        self._note_columns(name for _, data in rows for name in data)
        known = self.items([image for image, _ in rows])
        changed = {image: {"data": _present(data)} for image, data in rows if known[image].data != _present(data)}
        self._rewrite(changed)

    def _rewrite(self, changes: Mapping[int, Mapping[str, Any]]) -> None:
        """Changes some fields of rows. Milvus replaces rows whole, under new ids."""
        fields = [*FIELDS, "vector", "thumbnail", "data"]
        for rows in self._pages(list(changes), ["id", *fields]):
            with self._asking():
                self._client.insert(self.name, [{**{f: row[f] for f in fields}, **changes[row["id"]]} for row in rows])
                self._client.delete(self.name, [row["id"] for row in rows])

    def _note_columns(self, names: Iterable[str]) -> None:
        known = self.columns()
        new = [name for name in dict.fromkeys(names) if name not in known]
        if new:
            self.set("columns", [*known, *new])

    # ------------------------------------------------------------------ reading

    def known(self) -> KnownRows:
        """All images by path and box."""
        return {(r["path"], r["box"]): Known(r["id"], r["label"], r["size"], r["time"]) for r in self._all(["id", *FIELDS])}

    def columns(self) -> list[str]:
        """The names of the metadata's columns."""
        return list(self.get("columns", []))

    def some_ids(self, filters: Sequence[Filter] = ()) -> np.ndarray:
        """(up to PAGE,) int64: ids of rows that meet every filter, to look at."""
        with self._asking():
            rows = self._client.query(self.name, filter=self._where(filters), output_fields=["id"], limit=PAGE)
        return np.array([row["id"] for row in rows], np.int64)

    def ids(self, filters: Sequence[Filter] = ()) -> np.ndarray:
        """(N,) int64, increasing: all, or those that meet every filter."""
        return np.sort(np.array([row["id"] for row in self._all(["id"], filters)], np.int64))

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        """(len(ids), D) float32, in the order of the ids; zeros for images that are no longer in the index."""
        rows = np.zeros((len(ids), self.get("dim")), np.float32)
        place = {image: row for row, image in enumerate(ids.tolist())}
        for page in self._pages(ids.tolist(), ["id", "vector"]):
            for row in page:
                rows[place[row["id"]]] = row["vector"]
        return rows

    def items(self, ids: Sequence[int]) -> dict[int, Item]:
        """Path, label and metadata of some images; those that are not in the index are left out."""
        return {row["id"]: _item(row) for page in self._pages([int(image) for image in ids], SHOWN) for row in page}

    def key_of(self, image: int) -> tuple[str, str] | None:
        """Path and box of an image, which identify it in every index of the same source."""
        rows = next(self._pages([image], ["path", "box"]), [])
        return (rows[0]["path"], rows[0]["box"]) if rows else None

    def find(self, key: tuple[str, str]) -> int | None:
        """The id of the image with this path and box."""
        condition = f"path == {json.dumps(key[0])} and box == {json.dumps(key[1])}"
        with self._asking():
            rows = self._client.query(self.name, filter=condition, output_fields=["id"], limit=1)
        return rows[0]["id"] if rows else None

    def thumbnail(self, image: int) -> bytes | None:
        """A small version of the image, as WebP."""
        rows = next(self._pages([image], ["thumbnail"]), [])
        return base64.b64decode(rows[0]["thumbnail"]) or None if rows else None

    def labels(self) -> list[tuple[str, int]]:
        """(label, number of images) for each label that is not empty."""
        counts: dict[str, int] = {}
        for row in self._all(["label"]):
            if row["label"]:
                counts[row["label"]] = counts.get(row["label"], 0) + 1
        return sorted(counts.items())

    def search(self, vector: np.ndarray, k: int, filters: Sequence[Filter] = ()) -> list[tuple[Item, float]]:
        """The k nearest to (D,) that meet every filter, nearest first, with their similarities."""
        if filters and len(few := self.some_ids(filters)) <= FEW:
            return self._nearest_of(few, vector, k)
        with self._asking():
            (hits,) = self._client.search(
                self.name,
                [np.asarray(vector, np.float32).tolist()],
                limit=k,
                filter=self._where(filters),
                output_fields=SHOWN[1:],
            )
        return [(_item({"id": hit["id"], **hit["entity"]}), float(hit["distance"])) for hit in hits]

    def _nearest_of(self, ids: np.ndarray, vector: np.ndarray, k: int) -> list[tuple[Item, float]]:
        """An approximate search looks at a part of all rows, among which few or none of these may be."""
        similarity = self.vectors(ids) @ np.asarray(vector, np.float32)
        nearest = np.argsort(-similarity, kind="stable")[:k]
        items = self.items(ids[nearest].tolist())
        ranked = zip(ids[nearest].tolist(), similarity[nearest].tolist())
        return [(items[image], value) for image, value in ranked if image in items]

    def _pages(self, ids: Sequence[int], fields: list[str]) -> Iterator[list[dict[str, Any]]]:
        for start in range(0, len(ids), 1000):
            with self._asking():
                yield self._client.get(self.name, list(ids[start : start + 1000]), output_fields=fields)

    def _all(self, fields: list[str], filters: Sequence[Filter] = ()) -> Iterator[dict[str, Any]]:
        if self.get("dim") is None:
            return
        with self._asking():
            pages = self._client.query_iterator(self.name, batch_size=PAGE, filter=self._where(filters), output_fields=fields)
        while True:
            with self._asking():
                rows = pages.next()
            if not rows:
                pages.close()
                return
            yield from rows

    def _where(self, filters: Sequence[Filter]) -> str:
        if filters:
            check_columns(filters, self.columns())
        return " and ".join(expression(each) for each in filters)

    # ------------------------------------------------------------------ collections

    def _make_facts(self) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", DataType.VARCHAR, is_primary=True, max_length=200)
        schema.add_field("value", DataType.VARCHAR, max_length=TEXT)
        schema.add_field("unused", DataType.FLOAT_VECTOR, dim=2)  # every collection needs a vector
        self._create(self._facts, schema, "unused", "FLAT")

    def _make_rows(self, dim: int) -> None:
        from pymilvus import DataType

        schema = self._client.create_schema(auto_id=True, enable_dynamic_field=False)
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
        for name in ("path", "box", "label", "thumbnail"):
            schema.add_field(name, DataType.VARCHAR, max_length=TEXT)
        for name in ("size", "time"):
            schema.add_field(name, DataType.INT64)
        schema.add_field("data", DataType.JSON)
        self._create(self.name, schema, "vector", "HNSW", M=16, efConstruction=200)

    def _create(self, name: str, schema: Any, vector: str, kind: str, **params: int) -> None:
        index = self._client.prepare_index_params()
        index.add_index(vector, index_type=kind, metric_type="IP", params=params)
        self._client.create_collection(name, schema=schema, index_params=index, consistency_level="Strong")


def _item(row: Mapping[str, Any]) -> Item:
    return Item(row["id"], row["path"], row["label"], dict(row.get("data") or {}))


def _present(data: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in data.items() if value is not None}


def _text(webp: bytes) -> str:
    """Thumbnails that are too long for a text are left out."""
    text = base64.b64encode(webp).decode()
    return text if len(text) <= TEXT else ""


# ------------------------------------------------------------------ in a folder, or in Milvus

AnyCatalogue = Catalogue | MilvusCatalogue  # both have the same methods


def is_milvus(where: object) -> bool:
    return str(where).startswith(PREFIX)


def open_catalogue(where: Path | str) -> AnyCatalogue:
    """Opens the index in a folder, or in Milvus."""
    return MilvusCatalogue(str(where)) if is_milvus(where) else Catalogue(Path(where))


class MilvusNeighbours:
    """The nearest neighbors as Milvus finds them."""

    kind = "milvus"
    bytes = 0  # in this process

    def __init__(self, catalogue: MilvusCatalogue) -> None:
        self._catalogue = catalogue

    @property
    def ids(self) -> np.ndarray:
        """(up to 10,000,): some of the rows."""
        return self._catalogue.some_ids()

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Similarities and ids of the k nearest, nearest first; places without a result hold −inf and −1."""
        similarity, ids = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
        for row, query in enumerate(queries):
            for rank, (item, value) in enumerate(self._catalogue.search(query, k)):
                similarity[row, rank], ids[row, rank] = value, item.id
        return similarity, ids
