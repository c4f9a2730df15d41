"""Updates an index from a folder or table of images: new and changed images are embedded, missing ones are removed.

Images are added one batch per transaction, so that a killed update continues where it stopped.
"""

import fcntl
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.images import ImageSet, Row, image_files, readable
from xbm_app.data.own_images import read_records, row_of
from xbm_app.files import write_checkpoint
from xbm_app.search.catalogue import FILE, TABLES, Catalogue, Entry, model_file, root_of
from xbm_app.search.searcher import quickest_threads
from xbm_app.train.config import to_dict
from xbm_app.train.load import Embedder, load

BATCH = 64  # images that are embedded and written at once
THUMBNAIL = 192  # pixels of the longer side

Tell = Callable[[InputError], None]


@dataclass(frozen=True)
class Changes:
    """How many images an update added, embedded again, removed, kept and could not read."""

    new: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    unreadable: int = 0


def update(run: Path, source: Path, out: Path, tell: Tell, quiet: bool = False) -> Changes:
    """Updates the index in `out` to contain the images of `source`, embedded by the model of `run`.

    Args:
        source: a folder of images, or a table of image paths.
        tell: called with an error for every image or row that is skipped.

    Raises:
        InputError: `out` contains something else, or another process is writing to it.
    """
    entries = entries_of(source, tell)
    model = load(run)
    with _writing(out) as catalogue:
        _claim(catalogue, run, source, model, tell)
        known = catalogue.known()
        new = [entry for entry in entries if entry.key not in known]
        kept = [(entry, known[entry.key]) for entry in entries if entry.key in known]
        changed = [entry for entry, old in kept if (entry.size, entry.time) != (old.size, old.time)]
        gone = known.keys() - {entry.key for entry in entries}
        with catalogue.change():
            catalogue.remove(known[key].id for key in gone)
            catalogue.relabel((old.id, entry.label) for entry, old in kept if entry.label != old.label)
        todo = [*changed, *new]
        unreadable = _embed(catalogue, model, root_of(source), todo, tell, quiet) if todo else 0
        if not len(catalogue):
            raise InputError(f"none of the images of {source} can be read: give another folder")
    return Changes(len(new), len(changed), len(gone), len(kept) - len(changed), unreadable)


def _embed(catalogue: Catalogue, model: Embedder, root: Path, entries: Sequence[Entry], tell: Tell, quiet: bool) -> int:
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
                    catalogue.add([entries[index] for index in prepared], vectors, [webp for _, webp in prepared.values()])
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
def _writing(out: Path) -> Iterator[Catalogue]:
    """The catalogue in `out`, locked for this process; the lock ends with the process, even if it is killed."""
    if out.is_dir() and not (out / FILE).exists() and any(path.name != "lock" for path in out.iterdir()):
        raise InputError(f"{out} is neither empty nor an index: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another `xbm index` is writing to {out}: wait for it, or give another --out") from None
        with closing(Catalogue(out, write=True)) as catalogue:
            yield catalogue


def _claim(catalogue: Catalogue, run: Path, source: Path, model: Embedder, tell: Tell) -> None:
    """Records run, source and model of the index, or checks them; other weights of the same run empty the index."""
    digest = fingerprint(model)
    origin = {"source": str(source.resolve()), "run": str(run.resolve())}
    for name, path in origin.items():
        before = catalogue.get(name)
        if before not in (None, path):
            raise InputError(f"{catalogue.folder} is an index of the {name} {before}, not of {path}: give another --out")
    old = catalogue.get("model")
    if old == digest:
        return
    state = {"config": to_dict(model.config), "classes": [], "step": model.step, "model": model.model.state_dict()}
    write_checkpoint(model_file(catalogue.folder, digest), state)
    if old is not None:
        tell(InputError(f"the weights of {run} have changed since {catalogue.folder} was made: all images are embedded again"))
    with catalogue.change():
        catalogue.remove(catalogue.ids().tolist())
        for key, value in {**origin, "model": digest, "dim": model.dim}.items():
            catalogue.set(key, value)
    for stale in catalogue.folder.glob("model-*.pt"):
        if stale != model_file(catalogue.folder, digest):
            stale.unlink()


def fingerprint(model: Embedder) -> str:
    """A hash of everything that a vector depends on besides the image: weights and preprocessing."""
    digest = hashlib.sha256(json.dumps([to_dict(model.config)["model"], repr(model.augmentation)]).encode())
    for name, value in sorted(model.model.state_dict().items()):
        digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


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
        rows: Iterable[Row] = [Row(path, path.rpartition("/")[0], str(source / path)) for path in image_files(source)]
    elif source.suffix.lower() in TABLES:
        rows = _table(source, tell)
    else:
        raise InputError(f"{source} is neither a folder nor a .csv or .parquet table")
    root, entries = root_of(source), dict[tuple[str, str], Entry]()
    for row in rows:
        try:
            entry = _entry(root, row)
        except InputError as error:
            tell(error)
            continue
        if entries.setdefault(entry.key, entry) is not entry:
            tell(InputError(f"{row.where}: {row.path} is listed twice: the first entry counts"))
    if not entries:
        raise InputError(f"{source} contains no images that can be indexed (jpg, png, webp, ...)")
    return list(entries.values())


def _table(table: Path, tell: Tell) -> Iterable[Row]:
    for where, record in read_records(table, tell):
        try:
            yield row_of(record, where, labelled=False)
        except InputError as error:
            tell(error)


def _entry(root: Path, row: Row) -> Entry:
    try:
        stat = (root / row.path).stat()
    except OSError:
        raise InputError(f"{row.where}: {row.path} does not exist: it is skipped") from None
    return Entry(row.path, row.label, stat.st_size, stat.st_mtime_ns, row.box)
