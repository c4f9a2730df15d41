"""An index opened for searching: what embeds a query, the images nearest to it, and the page that shows them."""

import hashlib
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from traceback import extract_tb
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from xbm.errors import DamagedFileError, InputError, XbmError
from xbm_app.data.decoding import UNREADABLE, decode, fit
from xbm_app.data.transforms import as_channels
from xbm_app.extras import require
from xbm_app.files import write_bytes
from xbm_app.report.galleries import Encoder, strip, webp_uri
from xbm_app.report.writing import Html, shell, tag
from xbm_app.search.catalogue import FILE, Item, root_of
from xbm_app.search.filters import Filter, Value, fitting, refuse_misfits
from xbm_app.search.milvus import MilvusCatalogue, MilvusNeighbours, is_milvus, open_catalogue
from xbm_app.train.load import Embedder

MOST = 1000  # results per search
SIDE = 512  # pixels of the shorter side of what an encoder of the user's own gets


# ------------------------------------------------------------------ what embeds: a run's model, or an encoder of one's own


class OwnEncoder:
    """In the place of a trained run, a function of the user's own: a list of RGB images → an array (n, D).

    The shorter side of each image is `SIDE` pixels. If the object has a method `encode_text`, which takes a list of texts, the
    index can be searched by text as well. A class is called without arguments first. What it returns is scaled to unit length.

    Args:
        name: `module:object`; the module is imported from the current folder or the installed packages.

    Raises:
        InputError: there is no such object, or it cannot be called.
    """

    decoded_side = 2 * SIDE

    def __init__(self, name: str) -> None:
        module, _, attribute = name.partition(":")
        if not module or not attribute or module.startswith("."):
            raise InputError(f"--encoder takes module:object, such as clip_encoder:Encoder, got {name!r}")
        if "" not in sys.path:
            sys.path.insert(0, "")
        try:
            found: Any = import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part, None)
            if isinstance(found, type):
                found = found()
        except (XbmError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name in (module.split(".")[0], module):
                raise InputError(f"there is no module {module!r}: run the command in its folder, or install it") from None
            raise InputError(f"{name} cannot be imported or made without arguments ({_cause(error)}): correct it") from error
        if not callable(found):
            raise InputError(f"{name} is not a function or class: name what embeds a list of images")
        self.name, self._encode = name, found
        self._encode_text: Callable[[list[str]], Any] | None = getattr(found, "encode_text", None)

    @property
    def reads_text(self) -> bool:
        return self._encode_text is not None

    def view(self, image: Image.Image) -> np.ndarray:
        return fit(image.convert("RGB"), SIDE, "shorter")

    def embed_views(self, views: Sequence[np.ndarray]) -> torch.Tensor:
        """(n, D): unit rows."""
        return self._rows(self._encode, [Image.fromarray(view) for view in views])

    def embed_text(self, texts: Sequence[str]) -> torch.Tensor:
        """(n, D): unit rows.

        Raises:
            InputError: the encoder does not read text.
        """
        if self._encode_text is None:
            raise InputError(f"{self.name} has no method encode_text: search by image, or add one that takes a list of texts")
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
            raise InputError("the text is not UTF-8: write it in another way")
        return self._rows(self._encode_text, list(texts))

    def _rows(self, encode: Callable[[list[Any]], Any], inputs: list[Any]) -> torch.Tensor:
        count = len(inputs)
        try:
            returned = encode(inputs)
        except (XbmError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise XbmError(f"{self.name} failed on {count} inputs ({_cause(error)}): correct it") from error
        try:
            rows = torch.as_tensor(returned.detach().cpu() if isinstance(returned, torch.Tensor) else np.asarray(returned))
            rows = rows.float()
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(returned).__name__
            raise InputError(
                f"{self.name} must return an array ({count}, D) of numbers, got {kind} ({_cause(error)})"
            ) from None
        if rows.dim() != 2 or len(rows) != count or not rows.shape[1]:
            raise InputError(f"{self.name} must return an array ({count}, D) for {count} inputs, got {tuple(rows.shape)}")
        length = rows.norm(dim=1, keepdim=True)
        if not bool((torch.isfinite(length) & (length > 0)).all()):
            raise InputError(f"{self.name} returned a vector that is zero or not finite: correct it before indexing")
        return rows / length


def _cause(error: Exception) -> str:
    """An error in the code of the user, and its place there."""
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: " if frames else ""
    return f"{place}{type(error).__name__}: {shorten(str(error), 120, placeholder=' …')}"


def hash_weights(digest: "hashlib._Hash", model: Embedder) -> str:
    """Adds a model's weights to a hash: vectors can be compared only if they come from the same ones."""
    for name, value in sorted(model.model.state_dict().items()):
        digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def quickest_threads(model: Embedder | OwnEncoder | None, batch: int) -> Iterator[int]:
    """Runs its body with one thread or with all, whichever embeds a batch of that size faster.

    Small models on small images lose more to threads that wait for each other than they gain, on a busy machine a hundred
    times more; large models need all cores.
    """
    before = torch.get_num_threads()
    if not isinstance(model, Embedder):
        yield before
        return
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


# ------------------------------------------------------------------ the index


class Hit(NamedTuple):
    """One result of a search.

    Attributes:
        similarity: cosine similarity to the query.
        path: relative to the indexed folder.
        data: its metadata, by column.
    """

    id: int
    similarity: float
    label: str
    path: str
    data: dict[str, Value] = {}  # noqa: RUF012


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

    While `xbm index` changes the index, results may be missing, unless `hold` is set: then everything is read as it was.

    Attributes:
        name: name of the run or encoder that produced the vectors, or of the file that they come from.
        root: the indexed folder.
        count, dim: number of images, and length of a vector.
        columns: names of the metadata.
        ids: (N,) int64, the images of the index; in Milvus up to 10,000 of them.
        model: embeds queries; None for embeddings made elsewhere, unless an encoder is given.

    Args:
        encoder: embeds queries for an index without a model of its own.
        hold: whether to keep the content of this moment readable, for a process that runs long.
        model: used instead of the index's own copy if it was loaded from that.
    """

    def __init__(
        self,
        folder: str | Path,
        device: str = "auto",
        encoder: OwnEncoder | None = None,
        hold: bool = False,
        model: Embedder | None = None,
    ) -> None:
        require("serve", "faiss")
        from xbm_app.search.neighbours import open_neighbours

        self.folder = folder if is_milvus(folder) else find_index(Path(folder))
        self.catalogue = open_catalogue(self.folder)
        weakref.finalize(self, self.catalogue.close)
        if hold:
            self.catalogue.hold()
        if not len(self.catalogue):
            raise InputError(f"{self.folder} contains no images yet: run `xbm index` again")
        self._device, self._own = device, encoder
        source, run, digest = Path(self.catalogue.get("source")), self.catalogue.get("run"), self.catalogue.get("model")
        self.name = source.stem if run is None else Path(run).name
        self.root = root_of(source)
        self.model: Embedder | OwnEncoder | None = encoder
        if digest is not None and encoder is not None:
            raise InputError(f"{self.folder} contains the model that made its vectors: omit --encoder")
        if encoder is not None and run not in (None, encoder.name):
            raise InputError(f"{self.folder} was made by {run}, not by {encoder.name}: pass --encoder {run}")
        if digest is not None:
            self.model = (
                model if model is not None and self.catalogue.is_model(model.checkpoint, digest) else self._own_copy(digest)
            )
        self.neighbours = open_neighbours(self.catalogue)
        self.ids, self.count = self.neighbours.ids, len(self.catalogue)
        self.dim, self.columns = int(self.catalogue.get("dim")), self.catalogue.columns()

    def ids_of(self, filters: Sequence[Filter]) -> np.ndarray:
        """(n,): the images that meet every filter; in Milvus up to 10,000 of them.

        Raises:
            InputError: the value of a filter is of another kind than those of its column.
        """
        if not filters:
            return self.ids
        ids = self._ids(filters := fitting(filters, self._has))
        if not len(ids):
            refuse_misfits(filters, self._has)
        return ids

    def _ids(self, filters: Sequence[Filter]) -> np.ndarray:
        return self.catalogue.some_ids(filters) if isinstance(self.catalogue, MilvusCatalogue) else self.catalogue.ids(filters)

    def _has(self, column: str, kind: type) -> bool:
        """Whether any row has a text (str) or a number (float) in a column."""
        return len(self._ids([Filter(column, ">=", "" if kind is str else -sys.float_info.max)])) > 0

    def _own_copy(self, digest: str) -> Embedder:
        """The model whose weights the index contains."""
        with self.catalogue.model_file(digest) as file:
            model = Embedder(file, self._device)
        weights = self.catalogue.get("weights")  # None: of an older version
        if weights not in (None, hash_weights(hashlib.sha256(), model)):
            raise DamagedFileError(file, f"{file} has other weights than the index was made with: run `xbm index` again")
        return model

    def newer(self) -> "Searcher | None":
        """The index as the latest complete update left it; None if this is it. For searchers that hold their content."""
        if not self.catalogue.replaced():
            self.catalogue.settle()
            return None
        model = self.model if isinstance(self.model, Embedder) else None
        newer = Searcher(self.folder, self._device, self._own, hold=True, model=model)
        return newer if newer.catalogue.complete else None  # another update may have begun

    def encoder(self) -> Embedder | OwnEncoder:
        """What embeds queries.

        Raises:
            InputError: the index has none.
        """
        if self.model is None:
            run = self.catalogue.get("run")
            raise InputError(f"{self.folder} contains no model to embed queries: pass --encoder {run or 'module:object'}")
        return self.model

    def open(self, path: Path) -> Image.Image:
        """A query image, decoded in the same way as the indexed images."""
        side = self.encoder().decoded_side
        try:
            return decode(path, side)
        except FileNotFoundError:
            raise InputError(f"{path} does not exist: give the path of an image") from None
        except UNREADABLE as error:
            raise InputError(f"{path} cannot be read as an image ({error})") from None

    def embed(self, image: Image.Image) -> np.ndarray:
        """(1, D): the embedding of a query."""
        model = self.encoder()
        return self._of_this_index(model.embed_views([model.view(image)]).numpy())

    @property
    def fitting(self) -> tuple[int, str]:
        """How `fit` resizes an image for the model: size and mode."""
        model = self.encoder()
        return (SIDE, "shorter") if isinstance(model, OwnEncoder) else (model.augmentation.resize, model.augmentation.mode)

    def embed_fitted(self, pixels: np.ndarray) -> np.ndarray:
        """(1, D): the embedding of a query that was resized by `fit` as the model needs it.  # (h, w, 3) uint8"""
        model = self.encoder()
        view = pixels if isinstance(model, OwnEncoder) else as_channels(pixels, model.augmentation.channels)
        return self._of_this_index(model.embed_views([view]).numpy())

    @property
    def reads_text(self) -> bool:
        return isinstance(self.model, OwnEncoder) and self.model.reads_text

    def embed_text(self, text: str) -> np.ndarray:
        """(1, D): the embedding of a text."""
        model = self.encoder()
        if not isinstance(model, OwnEncoder):
            raise InputError(f"{self.name} embeds images only: search by image, or index with an --encoder that reads text")
        return self._of_this_index(model.embed_text([text]).numpy())

    def unit(self, vector: np.ndarray) -> np.ndarray:
        """(D,): a vector of unit length for a search."""
        with np.errstate(over="ignore"):
            length = float(np.linalg.norm(vector))
        if not 0 < length < np.inf:
            raise InputError("the vector is zero or not finite: pass an embedding of the same encoder")
        return self._of_this_index((vector / length)[None])[0]

    def _of_this_index(self, vector: np.ndarray) -> np.ndarray:
        if vector.shape[1] != self.dim:
            raise InputError(f"the vectors of the index have {self.dim} numbers, not {vector.shape[1]}: use the same encoder")
        return vector

    def search(self, vector: np.ndarray, top: int = 10, filters: Sequence[Filter] = (), offset: int = 0) -> list[Hit]:
        """The `top` nearest images, nearest first, among those that meet every filter.

        Args:
            vector: (1, D) or (D,), unit length.
            offset: how many of the nearest to leave out: those of earlier pages.
        """
        _check(top, offset)
        return self._nearest(vector, top + offset, filters)[offset:]

    def _nearest(self, vector: np.ndarray, top: int, filters: Sequence[Filter]) -> list[Hit]:
        hits = self._search(vector, top, filters := fitting(filters, self._has))
        if not hits:
            refuse_misfits(filters, self._has)
        return hits

    def _search(self, vector: np.ndarray, top: int, filters: Sequence[Filter]) -> list[Hit]:
        if isinstance(self.catalogue, MilvusCatalogue):
            near = self.catalogue.search(np.asarray(vector, np.float32).reshape(-1), top, filters)
            return [_hit(item, min(max(value, -1.0), 1.0)) for item, value in near]
        among = self.catalogue.ids(filters) if filters else None
        assert not isinstance(self.neighbours, MilvusNeighbours)
        similarity, ids = self.neighbours.search(np.asarray(vector, np.float32).reshape(1, -1), top, among)
        items = self.catalogue.items([image for image in ids[0].tolist() if image >= 0])
        ranked = zip(ids[0].tolist(), np.clip(similarity[0], -1, 1).tolist())
        return [
            Hit(image, s, items[image].label, items[image].path, items[image].data) for image, s in ranked if image in items
        ]

    def like(self, image: int, top: int = 10, filters: Sequence[Filter] = (), offset: int = 0) -> list[Hit]:
        """The images nearest to an image of the index, without the image itself."""
        _check(top, offset)
        vector = self.catalogue.vectors(np.array([image]))
        nearest = self._nearest(vector, top + offset + 1, filters)
        return [hit for hit in nearest if hit.id != image][offset : offset + top]


def _hit(item: Item, similarity: float) -> Hit:
    return Hit(item.id, similarity, item.label, item.path, item.data)


def _check(top: int, offset: int) -> None:
    if not (top >= 1 and offset >= 0 and top + offset <= MOST):
        raise InputError(f"the number of results must be 1 to {MOST}, those that are left out included, got {top + offset}")


# ------------------------------------------------------------------ the page that `xbm search --sheet` writes

ENCODE = Encoder(320, 80)  # the picture of a query
Query = tuple[str, Image.Image | None, Sequence[Hit]]  # its name, or its text where there is no image, and its results


def write_results_page(
    out: Path,
    title: str,
    queries: Sequence[Query],
    thumbnail: Callable[[int], bytes | None],
) -> Path:
    """Writes one self-contained HTML file, each query with its results, and returns its path.

    Args:
        thumbnail: returns the WebP thumbnail of an image of the index.
    """
    sections = []
    for name, image, hits in queries:
        picture = [] if image is None else [_frame(ENCODE(image), f"query {name}")]
        query = tag("figure", *picture, tag("figcaption", "query" if picture else "query by text"))
        results = [_result(rank, hit, thumbnail(hit.id)) for rank, hit in enumerate(hits, start=1)]
        sections.append(tag("section", tag("h2", name), tag("div", query, strip(results, "nothing found"), class_="sheet")))
    heading = tag("header", tag("h1", title), tag("p", "Nearest first; the number is the similarity.", class_="extent"))
    write_bytes(out, shell(title, tag("main", heading, *sections)))
    return out


def _result(rank: int, hit: Hit, webp: bytes | None) -> Html:
    name = hit.label or hit.path
    similarity = f"{hit.similarity:.3f}".replace("-", "−")
    image = _frame(webp_uri(webp or b""), f"rank {rank}: {name}")
    return tag("li", image, tag("b", similarity), tag("small", name, title=hit.path))


def _frame(source: str, alt: str) -> Html:
    return tag("span", tag("img", src=source, alt=alt, decoding="async"), class_="frame")
