"""Updates an index: from a folder or table of images, which are embedded, or from embeddings made elsewhere.

What is new or changed is added, what is missing is removed. Every batch is one transaction, so that a killed update continues
where it stopped.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.decoding import UNREADABLE, decode
from xbm_app.data.images import ImageSet, Row, image_files, inside, readable
from xbm_app.data.own_images import COLUMNS, read_records, row_of
from xbm_app.files import CHECKSUMS, lock, open_in_place, write_checkpoint
from xbm_app.search.catalogue import FILE, TABLES, Catalogue, Entry, KnownRows, root_of
from xbm_app.search.embeddings import metadata_columns, read_embeddings
from xbm_app.search.filters import Value, plain
from xbm_app.search.milvus import AnyCatalogue, MilvusCatalogue, is_milvus
from xbm_app.search.searcher import OwnEncoder, hash_weights, quickest_threads
from xbm_app.train.config import to_dict
from xbm_app.train.load import Embedder, load

BATCH = 64  # images that are embedded and written at once
# the settings of a model that a vector depends on; how it was trained is none of them
MODEL = ("trunk", "dim", "pooling", "weights", "freeze_batch_norm", "trunk_lr")
THUMBNAIL = 192  # pixels of the longer side

Tell = Callable[[InputError], None]
Data = dict[str, Value]  # metadata of a row, by column
Then = Callable[[AnyCatalogue, "Changes"], None]  # called at the end, before the index is released to other processes


@dataclass(frozen=True)
class Changes:
    """How many images an update added, embedded again, removed, kept and could not read."""

    new: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    unreadable: int = 0


def update(
    run: Path | OwnEncoder,
    source: Path,
    out: Path | str,
    tell: Tell,
    quiet: bool = False,
    then: Then | None = None,
) -> Changes:
    """Updates the index in `out` to contain the images of `source`, embedded by the model of `run` or an encoder.

    Args:
        source: a folder of images, or a table of image paths, whose other columns become metadata.
        tell: called with an error for every image or row that is skipped.

    Raises:
        InputError: `out` contains something else, or another process is writing to it.
    """
    entries = entries_of(source, tell)
    model = run if isinstance(run, OwnEncoder) else load(run)
    with _writing(out) as catalogue:
        _claim(catalogue, run.name if isinstance(run, OwnEncoder) else str(run.resolve()), source, model, tell)
        known = catalogue.known()
        new = [entry for entry in entries if entry.key not in known]
        kept = [(entry, known[entry.key]) for entry in entries if entry.key in known]
        changed = [entry for entry, old in kept if (entry.size, entry.time) != (old.size, old.time)]
        root, folder = root_of(source), source.is_dir()
        unlisted = known.keys() - {entry.key for entry in entries}
        gone = [key for key in unlisted if not _may_exist(root, key[0], folder)]
        cut_off = Counter(link for path, _ in unlisted if (link := _dangling_link(root, path)) is not None)
        for link, count in cut_off.items():
            tell(InputError(f"{link} is a link to what cannot be reached: of the index, {count:,} images below it stay"))
        with catalogue.change():
            catalogue.remove(known[key].id for key in gone)
            catalogue.relabel((old.id, entry.label) for entry, old in kept if entry.label != old.label)
            catalogue.describe([(old.id, entry.data) for entry, old in kept if entry.data])
        todo = [*changed, *new]
        unreadable = _embed(catalogue, model, root, todo, known, tell, quiet) if todo else 0
        if not len(catalogue):
            raise InputError(f"none of the images of {source} can be read: give another folder")
        changes = Changes(len(new), len(changed), len(gone), len(kept) - len(changed), unreadable)
        if then is not None:
            then(catalogue, changes)
    return changes


def _may_exist(root: Path, path: str, listed: bool) -> bool:
    """Whether a file that is not among the images of a source may only be out of reach: such an image stays in the index.

    Args:
        listed: whether every image that exists should be among them, as in a folder; in a table, a row can be removed.
    """
    try:
        (root / path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return _dangling_link(root, path) is not None
    except OSError:
        return True
    return listed


def _dangling_link(root: Path, path: str) -> Path | None:
    """The link on the way from `root` to a file whose target is not there, as that of a disk that is not mounted."""
    links = (each for each in [root / path, *(root / path).parents] if each != root and each.is_relative_to(root))
    with suppress(OSError):
        return next((link for link in links if link.is_symlink() and not link.exists()), None)
    return None


def update_embeddings(file: Path, out: Path | str, images: Path | None, tell: Tell, then: Then | None = None) -> Changes:
    """Updates the index in `out` to contain the embeddings in `file`, which were made elsewhere.

    Args:
        images: the folder that the paths are relative to, for thumbnails.
        tell: called with an error for every image without a thumbnail.
    """
    with _writing(out) as catalogue:
        known, seen, new, changed, dim = catalogue.known(), set[tuple[str, str]](), 0, 0, 0
        for entries, vectors in read_embeddings(file):
            if not seen:
                dim = vectors.shape[1]
                _claim(catalogue, None, file, None, tell, dim)
            if vectors.shape[1] != dim:
                raise InputError(f"{file} has vectors of {dim} and of {vectors.shape[1]} numbers: make them all of one length")
            repeated = next((e for e in entries if e.key in seen or seen.add(e.key)), None)  # type: ignore[func-returns-value]
            if repeated is not None:
                raise InputError(f"{file} has two rows with the path {repeated.path}: make the paths unique")
            old = [known.get(entry.key) for entry in entries]
            differs = [row for row, before in enumerate(old) if before is None or _version(entries[row]) != before[1:]]
            new += sum(old[row] is None for row in differs)
            changed += sum(old[row] is not None for row in differs)
            todo = [entries[row] for row in differs]
            thumbnails = [b"" if images is None else _thumbnail_of(images, entry, tell) for entry in todo]
            with catalogue.change():
                catalogue.add(todo, vectors[differs], thumbnails, known)
        gone = [known[key].id for key in known.keys() - seen]
        with catalogue.change():
            catalogue.remove(gone)
        changes = Changes(new, changed, len(gone), len(seen) - new - changed)
        if then is not None:
            then(catalogue, changes)
    return changes


def _version(entry: Entry) -> tuple[str, int, int]:
    return entry.label, entry.size, entry.time


def _thumbnail_of(root: Path, entry: Entry, tell: Tell) -> bytes:
    try:
        return thumbnail(decode(root / inside(entry.path, str(root)), 2 * THUMBNAIL))
    except FileNotFoundError:
        tell(InputError(f"{root / entry.path} does not exist: the row has no thumbnail"))
    except (InputError, *UNREADABLE) as error:
        tell(InputError(f"{root / entry.path} cannot be read as an image ({error}): the row has no thumbnail"))
    return b""


def _embed(
    catalogue: AnyCatalogue,
    model: Embedder | OwnEncoder,
    root: Path,
    entries: Sequence[Entry],
    known: KnownRows,
    tell: Tell,
    quiet: bool,
) -> int:
    """Embeds and adds images batch by batch; returns how many could not be read."""

    def prepare(image: Image.Image) -> tuple[np.ndarray, bytes]:
        return model.view(image), thumbnail(image)

    unreadable = 0
    with quickest_threads(model, min(BATCH, 8)):
        for prepared, failed in readable(_images(root, entries), prepare, model.decoded_side, BATCH, quiet):
            vectors = model.embed_views([view for view, _ in prepared.values()]).numpy() if prepared else None
            unreadable += len(failed)
            with catalogue.change():
                for index, error in failed.items():
                    tell(error)
                    catalogue.discard(entries[index].key)
                if vectors is not None:
                    if catalogue.get("dim") is None:  # an encoder of one's own shows it with its first vectors
                        catalogue.set("dim", vectors.shape[1])
                    thumbnails = [webp for _, webp in prepared.values()]
                    catalogue.add([entries[index] for index in prepared], vectors, thumbnails, known)
    return unreadable


def _images(root: Path, entries: Sequence[Entry]) -> ImageSet:
    boxed = any(entry.box for entry in entries)
    return ImageSet(
        name="images",
        labels=np.zeros(len(entries), np.int64),
        class_names=["image"],
        root=root,
        paths=[entry.path for entry in entries],
        boxes=np.array([entry.box for entry in entries], np.int64) if boxed else None,
    )


@contextmanager
def _writing(where: Path | str) -> Iterator[AnyCatalogue]:
    """The catalogue in a folder, locked for this process, or in Milvus, which has no locks.

    The lock ends with the process, even if it is killed.
    """
    if is_milvus(where):
        with closing(MilvusCatalogue(str(where), write=True)) as remote:
            yield remote
        return
    out = Path(where)
    if out.is_dir() and not (out / FILE).exists() and any(path.name not in ("lock", CHECKSUMS) for path in out.iterdir()):
        raise InputError(f"{out} is neither empty nor an index: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    with open(open_in_place(out / "lock"), "r+b") as file:
        if not lock(file.fileno()):
            raise InputError(f"another `xbm index` is writing to {out}: wait for it, or give another --out")
        with closing(Catalogue(out, write=True)) as catalogue:
            try:
                yield catalogue
            finally:
                catalogue.seal()


def _claim(
    catalogue: AnyCatalogue,
    run: str | None,
    source: Path,
    model: Embedder | OwnEncoder | None,
    tell: Tell,
    dim: int | None = None,
) -> None:
    """Records run, source and model of the index, or checks them; other weights of the same run empty the index."""
    digest = fingerprint(model) if isinstance(model, Embedder) else None
    origin = {"source": str(source.resolve()), "run": run}
    for name, path in origin.items():
        before = catalogue.get(name)
        if before != path and len(catalogue):
            raise InputError(f"{catalogue.folder} is an index of the {name} {before}, not of {path}: give another --out")
    weights = hash_weights(hashlib.sha256(), model) if isinstance(model, Embedder) else None
    if isinstance(model, Embedder):
        dim = model.dim
        state = {"config": to_dict(model.config), "classes": [], "step": model.step, "model": model.model.state_dict()}
        # again even if it is there, in case it was replaced or damaged
        catalogue.keep_model(str(digest), lambda file: write_checkpoint(file, state))
    old = catalogue.get("model")
    if len(catalogue) and old == digest:
        catalogue.set("weights", weights)  # which an older version did not record
        return
    if old is not None:
        tell(InputError(f"the weights of {run} have changed since {catalogue.folder} was made: all images are embedded again"))
    with catalogue.change():
        catalogue.remove(catalogue.ids().tolist())
        for key, value in {**origin, "model": digest, "weights": weights, "dim": dim}.items():
            catalogue.set(key, value)


def fingerprint(model: Embedder) -> str:
    """A hash of everything that a vector depends on besides the image: weights and preprocessing."""
    settings = {name: value for name, value in to_dict(model.config)["model"].items() if name in MODEL}
    usual = ", interpolation='bilinear'"  # indexes are older than this setting
    described = repr(model.augmentation).replace(usual, "")
    digest = hashlib.sha256(json.dumps([settings, described]).encode())
    return hash_weights(digest, model)[:16]


def thumbnail(image: Image.Image) -> bytes:
    """A small version of the image, as WebP."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "WEBP", quality=80, method=2)
    return file.getvalue()


# ------------------------------------------------------------------ what is to be indexed


def entries_of(source: Path, tell: Tell) -> list[Entry]:
    """The images of a folder and its subfolders, labeled by folder, or of a CSV or Parquet table with path and label.

    Args:
        tell: called with an error for every row or file that is skipped.

    Raises:
        InputError: there is no image at all, so that a disk that is not mounted never empties an index.
    """
    if source.is_dir():
        files = image_files(source, tell)
        rows: Iterable[tuple[Row, Data]] = [(Row(path, path.rpartition("/")[0], str(source / path)), {}) for path in files]
    elif source.suffix.lower() in TABLES:
        rows = _table(source, tell)
    else:
        raise InputError(f"{source} is neither a folder nor a .csv or .parquet table")
    root, entries = root_of(source), dict[tuple[str, str], Entry]()
    for row, data in rows:
        try:
            entry = _entry(root, row, data)
        except InputError as error:
            tell(error)
            continue
        if entries.setdefault(entry.key, entry) is not entry:
            tell(InputError(f"{row.where}: {row.path} is listed twice: the first entry counts"))
    if not entries:
        raise InputError(f"{source} contains no images that can be indexed (jpg, png, webp, ...)")
    return list(entries.values())


def _table(table: Path, tell: Tell) -> Iterable[tuple[Row, Data]]:
    for where, record in read_records(table, tell, every_column=True):
        try:
            row = row_of(record, where, labelled=False)
        except InputError as error:
            tell(error)
            continue
        others = metadata_columns({name: text for name, text in record.items() if name not in COLUMNS})
        yield row, {name: plain(text) for name, text in others.items()}


def _entry(root: Path, row: Row, data: Data) -> Entry:
    try:
        stat = (root / row.path).stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{row.where}: {row.path} does not exist: it is skipped") from None
    except OSError as error:
        raise InputError(f"{row.where}: {row.path} cannot be read ({error.strerror}): it is skipped") from None
    return Entry(row.path, row.label, stat.st_size, stat.st_mtime_ns, row.box, data)
