"""An index opened for searching: an image in, the nearest images out."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.images import UNREADABLE, decode
from xbm_app.extras import require
from xbm_app.search.catalogue import Catalogue
from xbm_app.search.update import model_file
from xbm_app.train.load import Embedder

MOST = 1000  # results of one search


class Hit(NamedTuple):
    """One result of a search.

    Attributes:
        similarity: the cosine with the query, from −1 to 1.
        path: relative to the folder that was indexed.
    """

    id: int
    similarity: float
    label: str
    path: str


def find_index(folder: Path) -> Path:
    """An index given as itself, or by the run folder it lies in."""
    if not (folder / "index.sqlite").exists() and (folder / "index" / "index.sqlite").exists():
        return folder / "index"
    return folder


def shown_path(root: Path, path: str) -> str:
    """A path of an index so that it can be opened from here: relative where it lies below the present folder."""
    full = root / path
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else str(full)


class Searcher:
    """Searches an index as it is when it is opened.

    Attributes:
        name: of the run whose model made the vectors.
        root: the folder that was indexed.
        ids: (N,) int64, of the images in it.
    """

    def __init__(self, folder: str | Path, device: str = "auto") -> None:
        require("search", "faiss")
        from xbm_app.search.neighbours import open_neighbours

        self.folder = find_index(Path(folder))
        self.catalogue = Catalogue(self.folder)
        if not len(self.catalogue):
            raise InputError(f"{self.folder} holds no image yet: run `xbm index` again")
        self.name = Path(self.catalogue.get("run")).name
        source = Path(self.catalogue.get("source"))
        self.root = source.parent if source.suffix.lower() in (".csv", ".parquet") else source
        self.model = Embedder(model_file(self.folder, self.catalogue.get("model")), device)
        self.neighbours = open_neighbours(self.catalogue)
        self.ids = self.neighbours.ids

    def open(self, path: Path) -> Image.Image:
        """A query, decoded as the indexed images were."""
        try:
            return decode(path, self.model.decoded_side)
        except FileNotFoundError:
            raise InputError(f"{path} is missing: give the path of an image") from None
        except UNREADABLE as error:
            raise InputError(f"{path} cannot be read as an image ({error}): give another one") from None

    def embed(self, image: Image.Image) -> np.ndarray:
        """(1, D): the vector of a query."""
        return self.model.embed_views([self.model.view(image)]).numpy()

    def search(self, vector: np.ndarray, top: int = 10, label: str | None = None) -> list[Hit]:
        """The `top` nearest images, best first; with a `label`, of those that have it.

        Args:
            vector: (1, D) or (D,), of unit length.
        """
        _check(top)
        among = None if label is None else self.catalogue.ids(label)
        similarity, ids = self.neighbours.search(np.asarray(vector, np.float32).reshape(1, -1), top, among)
        items = self.catalogue.items([each for each in ids[0].tolist() if each >= 0])
        found = zip(ids[0].tolist(), np.clip(similarity[0], -1, 1).tolist())
        return [Hit(each, s, items[each].label, items[each].path) for each, s in found if each in items]

    def like(self, image: int, top: int = 10, label: str | None = None) -> list[Hit]:
        """The nearest to an image of the index, itself left out."""
        _check(top)
        vector = self.catalogue.vectors(np.array([image]))
        return [hit for hit in self.search(vector, min(top + 1, MOST), label) if hit.id != image][:top]


def _check(top: int) -> None:
    if not 1 <= top <= MOST:
        raise InputError(f"{top} results cannot be shown: ask for 1 to {MOST}")
