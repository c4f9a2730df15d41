"""Nearest-neighbor search in an index by faiss: exact while the vectors easily fit in memory, compressed beyond that.

The compressed form is a product quantizer with two bits per dimension that is scanned completely; its best candidates are
compared again with 16 bits per dimension. Without cells to probe there is no parameter to tune, and vectors without any
structure are found too.
"""

import math
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from xbm.errors import DamagedFileError
from xbm_app.files import replacing, verify
from xbm_app.search.catalogue import Catalogue
from xbm_app.search.milvus import AnyCatalogue, MilvusCatalogue, MilvusNeighbours

FILE = "compressed.faiss"
EXACT_BYTES = 200_000_000  # limit of exact search, in float32: 390,000 rows of 128 dimensions take about 40 ms on one core
CHUNK = 100_000  # rows read at once
TRAINED_ON = 65_536  # rows that the quantizer is trained on
CANDIDATES = 1000  # rows of the scan that are compared again, at least
FEW = 20_000  # rows that a filter leaves, up to which they are read and compared one by one
STALE = 0.2  # share of codes of removed images above which all codes are rewritten
GROWTH = 4  # the quantizer is trained again when the index has grown by this factor


class Exact:
    """All vectors, uncompressed."""

    kind = "exact"

    def __init__(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        self.ids, self._index = ids, faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

    @property
    def bytes(self) -> int:
        return 4 * self._index.d * len(self.ids)

    def search(self, queries: np.ndarray, k: int, among: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Similarities and ids of the k nearest, nearest first; places without a result hold −inf and −1.

        Args:
            queries: (Q, D) float32.
            among: increasing ids; only these are searched.
        """
        if not len(self.ids):
            return _nothing(len(queries), k)
        params = None
        if among is not None:
            places = np.flatnonzero(np.isin(self.ids, among))
            params = faiss.SearchParameters(sel=faiss.IDSelectorBatch(places))
        similarity, place = _search(self._index, queries, min(k, len(self.ids)), params)
        return _ranked(np.where(place < 0, -np.inf, similarity), np.where(place < 0, -1, self.ids[place]), k)


class Compressed:
    """Codes of all vectors; codes of images that were removed from the catalogue are skipped."""

    kind = "compressed"

    def __init__(self, index: "faiss.IndexIDMap", catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._map = index  # owns what is searched
        self._refine = faiss.downcast_index(index.index)
        self._coded = faiss.vector_to_array(index.id_map)  # (codes,) id of each code
        self.ids = catalogue.ids()
        self._dead = len(self._coded) - int(np.isin(self._coded, self.ids, assume_unique=True).sum())

    @property
    def bytes(self) -> int:
        base = faiss.downcast_index(self._refine.base_index)
        per_image = base.code_size + faiss.downcast_index(self._refine.refine_index).code_size + 8
        return per_image * len(self._coded)

    def search(self, queries: np.ndarray, k: int, among: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Like `Exact.search`. With up to `FEW` rows `among` the search is exact; more are picked from a deeper scan."""
        if among is not None and len(among) <= FEW:
            return _best(queries, among, self._catalogue.vectors(among), k)
        allowed = self.ids if among is None else among
        some = among is not None or self._dead > 0
        depth = k if not some else math.ceil(2 * k * len(self._coded) / max(1, len(allowed)))
        while True:
            depth = min(depth, len(self._coded))
            factor = max(CANDIDATES / max(1, depth), 8.0)
            params = faiss.IndexRefineSearchParameters(k_factor=factor)
            similarity, place = _search(self._refine, queries, depth, params)
            ids = np.where(place < 0, -1, self._coded[place])
            if some:
                here = allowed[np.searchsorted(allowed, ids).clip(max=len(allowed) - 1)] == ids
                similarity, ids = np.where(here, similarity, -np.inf), np.where(here, ids, -1)
            enough = ((ids >= 0).sum(axis=1) >= min(k, len(allowed))).all()
            if enough or depth == len(self._coded):
                return _ranked(similarity, ids, k)
            depth *= 4


Neighbours = Exact | Compressed


def _search(index: Any, queries: np.ndarray, k: int, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """The search of faiss. Its torch extension, which other libraries load, replaces it by one without parameters."""
    search = getattr(index, "search_numpy", index.search)
    return search(queries, k, params=params)


def open_neighbours(catalogue: AnyCatalogue) -> Neighbours | MilvusNeighbours:
    """Search in the current state of a catalogue. Missing codes are computed but not stored; `build` stores them."""
    if isinstance(catalogue, MilvusCatalogue):
        return MilvusNeighbours(catalogue)
    exact = _exact(catalogue)
    return exact if exact is not None else Compressed(_up_to_date(catalogue)[0], catalogue)


def build(catalogue: AnyCatalogue) -> Neighbours | MilvusNeighbours:
    """Like `open_neighbours`, but stores the codes beside the catalogue for the next time."""
    if isinstance(catalogue, MilvusCatalogue):
        catalogue.build()
        return MilvusNeighbours(catalogue)
    path = catalogue.folder / FILE
    exact = _exact(catalogue)
    if exact is not None:
        path.unlink(missing_ok=True)
        return exact
    index, trained_at = _up_to_date(catalogue)
    with replacing(path, checksum=True) as beside:
        faiss.write_index(index, str(beside))
    catalogue.set("learnt_at", trained_at)
    return Compressed(index, catalogue)


def _exact(catalogue: Catalogue) -> Exact | None:
    ids, dim = catalogue.ids(), catalogue.get("dim")
    return Exact(ids, catalogue.vectors(ids)) if 4 * dim * len(ids) <= EXACT_BYTES else None


def recall(
    neighbours: Neighbours | MilvusNeighbours, catalogue: AnyCatalogue, k: int = 10, queries: int = 256, seed: int = 0
) -> float | None:
    """The share of the true k nearest neighbors that the search returns, measured on random images of the index.

    None for a larger index in Milvus: to compare with all of its rows, they would have to be read from the engine.
    """
    if isinstance(neighbours, Exact):
        return 1.0
    ids = neighbours.ids
    if len(ids) < len(catalogue):
        return None
    query_ids = np.sort(np.random.default_rng(seed).choice(ids, min(queries, len(ids)), replace=False))
    rows = catalogue.vectors(query_ids)
    _, retrieved = neighbours.search(rows, k + 1)
    similarity, truth = _nothing(len(query_ids), 0)
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        part = _best(rows, chunk, catalogue.vectors(chunk), k + 1)
        similarity, truth = _ranked(np.hstack([similarity, part[0]]), np.hstack([truth, part[1]]), k + 1)
    hits = total = 0
    for query, near, true in zip(query_ids.tolist(), retrieved.tolist(), truth.tolist()):
        true_others = set([image for image in true if image not in (query, -1)][:k])
        hits += len(true_others & set([image for image in near if image != query][:k]))
        total += len(true_others)
    return hits / max(1, total)


def _up_to_date(catalogue: Catalogue) -> tuple["faiss.IndexIDMap", int]:
    """The stored codes plus those of new images, and the number of images at the time the quantizer was trained.

    The quantizer is trained again if the index has outgrown it or no coded image is left; if too many codes belong to removed
    images, all are rewritten.
    """
    ids, dim, trained_at = catalogue.ids(), catalogue.get("dim"), catalogue.get("learnt_at", 0)
    index = _read(catalogue.folder / FILE, dim)
    coded = np.empty(0, np.int64) if index is None else faiss.vector_to_array(index.id_map)
    live = int(np.isin(coded, ids, assume_unique=True).sum())
    if index is None or not live or len(ids) > GROWTH * trained_at:
        index, coded, trained_at = _trained(catalogue, ids, dim), np.empty(0, np.int64), len(ids)
    elif len(coded) - live > STALE * len(coded):
        index.reset()  # keeps the trained quantizer
        coded = np.empty(0, np.int64)
    new = np.setdiff1d(ids, coded, assume_unique=True)
    for start in range(0, len(new), CHUNK):
        chunk = new[start : start + CHUNK]
        index.add_with_ids(catalogue.vectors(chunk), chunk)
    return index, trained_at


def _read(path: Path, dim: int) -> "faiss.IndexIDMap | None":
    """The stored codes; None if there are none or they cannot be read, since they can always be computed again."""
    if not path.exists():
        return None
    try:
        index = faiss.read_index(str(verify(path)))
    except (RuntimeError, DamagedFileError):
        return None
    return index if isinstance(index, faiss.IndexIDMap) and index.d == dim else None


def _trained(catalogue: Catalogue, ids: np.ndarray, dim: int) -> "faiss.IndexIDMap":
    parts = dim // 2 if dim % 2 == 0 else dim
    quantizer = faiss.index_factory(dim, f"PQ{parts}x4fs,Refine(SQfp16)", faiss.METRIC_INNER_PRODUCT)
    sample = np.sort(np.random.default_rng(0).choice(ids, min(TRAINED_ON, len(ids)), replace=False))
    quantizer.train(catalogue.vectors(sample))
    index = faiss.IndexIDMap(quantizer)
    quantizer.this.disown()  # the map frees it
    index.own_fields = True
    return index


def _best(queries: np.ndarray, ids: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest of some vectors, by exact search; padded like those of `Exact.search`."""
    if not len(ids):
        return _nothing(len(queries), k)
    similarity, place = faiss.knn(queries, vectors, min(k, len(ids)), metric=faiss.METRIC_INNER_PRODUCT)
    return _ranked(similarity, ids[place], k)


def _ranked(similarity: np.ndarray, ids: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k most similar of each row, ordered by similarity and, for equal similarities, by id; short rows are padded."""
    short = ((0, 0), (0, max(0, k - ids.shape[1])))
    similarity = np.pad(similarity, short, constant_values=-np.inf)
    ids = np.pad(ids, short, constant_values=-1)
    order = np.lexsort((ids, -similarity))[:, :k]
    return np.take_along_axis(similarity, order, 1), np.take_along_axis(ids, order, 1)


def _nothing(queries: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((queries, k), -np.inf, np.float32), np.full((queries, k), -1, np.int64)
