"""An index opened for searching: the nearest images to a query."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.images import UNREADABLE, decode
from xbm_app.extras import require
from xbm_app.search.catalogue import FILE, Catalogue, model_file, root_of
from xbm_app.train.load import Embedder

MOST = 1000  # results per search


class Hit(NamedTuple):
    """One result of a search.

    Attributes:
        similarity: cosine similarity to the query.
        path: relative to the indexed folder.
    """

    id: int
    similarity: float
    label: str
    path: str


def find_index(folder: Path) -> Path:
    """The folder of an index, given as itself or as the run folder that contains it."""
    inner = folder / "index"
    return inner if not (folder / FILE).exists() and (inner / FILE).exists() else folder


def shown_path(root: Path, path: str) -> str:
    """A path of an index as it can be opened from here: relative if it is below the current folder."""
    full = root / path
    return str(full.relative_to(Path.cwd())) if full.is_relative_to(Path.cwd()) else str(full)


class Searcher:
    """Searches an index in its state at the time of opening.

    Attributes:
        name: name of the run whose model produced the vectors.
        root: the indexed folder.
        ids: (N,) int64, the images of the index.
    """

    def __init__(self, folder: str | Path, device: str = "auto") -> None:
        require("search", "faiss")
        from xbm_app.search.neighbours import open_neighbours

        self.folder = find_index(Path(folder))
        self.catalogue = Catalogue(self.folder)
        if not len(self.catalogue):
            raise InputError(f"{self.folder} contains no images yet: run `xbm index` again")
        self.name = Path(self.catalogue.get("run")).name
        self.root = root_of(Path(self.catalogue.get("source")))
        self.model = Embedder(model_file(self.folder, self.catalogue.get("model")), device)
        self.neighbours = open_neighbours(self.catalogue)
        self.ids = self.neighbours.ids

    def open(self, path: Path) -> Image.Image:
        """A query image, decoded in the same way as the indexed images."""
        try:
            return decode(path, self.model.decoded_side)
        except FileNotFoundError:
            raise InputError(f"{path} does not exist: give the path of an image") from None
        except UNREADABLE as error:
            raise InputError(f"{path} cannot be read as an image ({error})") from None

    def embed(self, image: Image.Image) -> np.ndarray:
        """(1, D): the embedding of a query."""
        return self.model.embed_views([self.model.view(image)]).numpy()

    def search(self, vector: np.ndarray, top: int = 10, label: str | None = None) -> list[Hit]:
        """The `top` nearest images, nearest first; with `label`, only among images with that label.

        Args:
            vector: (1, D) or (D,), unit length.
        """
        _check(top)
        among = None if label is None else self.catalogue.ids(label)
        similarity, ids = self.neighbours.search(np.asarray(vector, np.float32).reshape(1, -1), top, among)
        items = self.catalogue.items([image for image in ids[0].tolist() if image >= 0])
        ranked = zip(ids[0].tolist(), np.clip(similarity[0], -1, 1).tolist())
        return [Hit(image, s, items[image].label, items[image].path) for image, s in ranked if image in items]

    def like(self, image: int, top: int = 10, label: str | None = None) -> list[Hit]:
        """The images nearest to an image of the index, without the image itself."""
        _check(top)
        vector = self.catalogue.vectors(np.array([image]))
        return [hit for hit in self.search(vector, min(top + 1, MOST), label) if hit.id != image][:top]


def _check(top: int) -> None:
    if not 1 <= top <= MOST:
        raise InputError(f"the number of results must be 1 to {MOST}, got {top}")


@contextmanager
def quickest_threads(model: Embedder, batch: int) -> Iterator[int]:
    """Runs its body with one thread or with all, whichever embeds a batch of that size faster.

    Small models on small images lose more to threads that wait for each other than they gain, on a busy machine a hundred
    times more; large models need all cores.
    """
    before = torch.get_num_threads()
    side, channels = model.augmentation.resize, model.augmentation.channels
    views = [np.zeros((side, side, channels), np.uint8)] * batch

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            model.embed_views(views)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    chosen = before
    if before > 1 and model.device.type == "cpu":
        chosen = min((1, before), key=seconds)
    torch.set_num_threads(chosen)
    try:
        yield chosen
    finally:
        torch.set_num_threads(before)
