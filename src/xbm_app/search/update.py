"""Brings an index in line with its images: what is new or changed is embedded, what is gone is removed, the rest is left alone.

Images are added a batch at a time, each batch whole or not at all, so that a killed run goes on where it stopped.
"""

import fcntl
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from xbm.errors import InputError
from xbm_app.data.images import ImageSet, readable
from xbm_app.search.catalogue import FILE, Catalogue, Known
from xbm_app.search.sources import Entry, Tell, entries_of, root_of
from xbm_app.search.threads import quickest_threads
from xbm_app.train.checkpoint import write_checkpoint
from xbm_app.train.config import to_dict
from xbm_app.train.load import Embedder, load

BATCH = 64  # images embedded, and written, at once
THUMBNAIL = 192  # pixels, of the longer side


@dataclass(frozen=True)
class Changes:
    """How many images an update found in which state."""

    new: int = 0
    changed: int = 0
    removed: int = 0
    unchanged: int = 0
    unreadable: int = 0


def update(run: Path, source: Path, out: Path, tell: Tell, quiet: bool = False) -> Changes:
    """Makes the index in `out` hold the images of `source` as the model of `run` embeds them.

    Args:
        source: a folder of images, or a table that names them.
        tell: is given a sentence for every image or row that is left out.

    Raises:
        InputError: `out` holds something else, or another process is writing to it.
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
        unreadable = _embed(catalogue, model, root_of(source), todo, known, tell, quiet) if todo else 0
        if not len(catalogue):
            raise InputError(f"none of the images of {source} can be read: mend them, or give another folder")
    return Changes(len(new), len(changed), len(gone), len(kept) - len(changed), unreadable)


def _embed(
    catalogue: Catalogue,
    model: Embedder,
    root: Path,
    entries: Sequence[Entry],
    known: dict[tuple[str, str], Known],
    tell: Tell,
    quiet: bool,
) -> int:
    """Embeds and adds images, batch by batch; returns how many could not be read."""

    def prepared(image: Image.Image) -> tuple[np.ndarray, bytes]:
        return model.view(image), thumbnail(image)

    unreadable = 0
    with quickest_threads(model, min(BATCH, 8)):
        for made, failed in readable(_images(root, entries), prepared, model.decoded_side, BATCH, quiet):
            vectors = model.embed_views([view for view, _ in made.values()]).numpy() if made else None
            unreadable += len(failed)
            with catalogue.change():
                for index, error in failed.items():
                    tell(error)
                    key = entries[index].key
                    catalogue.remove([known[key].id] if key in known else [])
                if vectors is not None:
                    catalogue.add([entries[index] for index in made], vectors, [small for _, small in made.values()])
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


def model_file(folder: Path, digest: str) -> Path:
    """Where an index keeps the weights that its vectors were made with."""
    return folder / f"model-{digest}.pt"


@contextmanager
def _writing(out: Path) -> Iterator[Catalogue]:
    """The catalogue in `out`, for one process at a time; the lock ends with the process, however that ends."""
    if out.is_dir() and not (out / FILE).exists() and any(each.name != "lock" for each in out.iterdir()):
        raise InputError(f"{out} is not empty and not an index: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another `xbm index` is writing to {out}: wait for it, or give another --out") from None
        with closing(Catalogue(out, write=True)) as catalogue:
            yield catalogue


def _claim(catalogue: Catalogue, run: Path, source: Path, model: Embedder, tell: Tell) -> None:
    """Says what the index is of, or checks that it is of the same; another state of the same run empties it."""
    digest = fingerprint(model)
    origin = {"source": str(source.resolve()), "run": str(run.resolve())}
    for name, where in origin.items():
        before = catalogue.get(name)
        if before not in (None, where):
            raise InputError(f"{catalogue.folder} is an index of the {name} {before}, not of {where}: give another --out")
    old = catalogue.get("model")
    if old == digest:
        return
    state = {"config": to_dict(model.config), "classes": [], "step": model.step, "model": model.model.state_dict()}
    write_checkpoint(model_file(catalogue.folder, digest), state)
    if old is not None:
        tell(InputError(f"{run} has other weights than when {catalogue.folder} was made: all images are embedded again"))
    with catalogue.change():
        catalogue.remove(catalogue.ids().tolist())
        for key, value in {**origin, "model": digest, "dim": model.dim}.items():
            catalogue.set(key, value)
    for stale in catalogue.folder.glob("model-*.pt"):
        if stale != model_file(catalogue.folder, digest):
            stale.unlink()


def fingerprint(model: Embedder) -> str:
    """Of all that a vector depends on besides the image: weights and preparation."""
    digest = hashlib.sha256(json.dumps([to_dict(model.config)["model"], repr(model.augmentation)]).encode())
    for name, value in sorted(model.model.state_dict().items()):
        digest.update(name.encode() + value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def thumbnail(image: Image.Image) -> bytes:
    """The image made small, as WebP."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "WEBP", quality=80, method=2)
    return file.getvalue()
