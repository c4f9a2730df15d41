"""Where an index is kept: in a folder, or in Milvus. Both have the same methods."""

from pathlib import Path

import numpy as np

from xbm_app.search.catalogue import Catalogue
from xbm_app.search.milvus import MilvusCatalogue
from xbm_app.search.milvus_connection import PREFIX

AnyCatalogue = Catalogue | MilvusCatalogue


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
