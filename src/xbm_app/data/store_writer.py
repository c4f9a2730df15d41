"""Makes image stores (`xbm prepare`): decodes and resizes every image once, so that training need not. See `store`."""

import errno
import json
import shutil
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from xbm.errors import DamagedFileError, InputError
from xbm_app.data.decoding import LONGEST, open_image
from xbm_app.data.encoded import EncodedSet
from xbm_app.data.images import Dataset, ImageSet, parts
from xbm_app.data.parallel import default_workers, in_order
from xbm_app.data.store import FORMAT, OUTLINE, Manifest, describe, read_manifest, shard_file, shard_shapes
from xbm_app.data.transforms import resized
from xbm_app.files import CHECKSUMS, replacing, verify, write_json
from xbm_app.progress import track


def estimate(images: ImageSet, resize: int = 256, mode: str = "square") -> int:
    """Estimates the bytes of a store: exact for "square", from the shapes of 200 images for "shorter"."""
    square = 3 * resize**2 * len(images)
    if mode == "square" or not len(images):
        return square
    if images.pixels is not None:
        aspects = [images.pixels.shape[2] / images.pixels.shape[1]]
    else:
        sample = np.unique(np.linspace(0, len(images) - 1, 200).astype(int)).tolist()
        aspects = [width / height for width, height in (_shape(images, index) for index in sample)]
    return int(square * np.mean([min(LONGEST, max(aspect, 1 / aspect)) for aspect in aspects]))


def _shape(images: ImageSet, index: int) -> tuple[int, int]:
    if images.boxes is not None:
        left, top, right, bottom = images.boxes[index].tolist()
        return max(1, right - left), max(1, bottom - top)
    assert images.root is not None and images.paths is not None
    if isinstance(images, EncodedSet):
        return images.open(index).size
    try:
        with open_image(images.root / images.paths[index]) as file:
            return file.size
    except OSError:
        return images.open(index).size  # raises the readable error for a missing or broken file


def to_write(images: ImageSet, out: Path, resize: int = 256, mode: str = "square") -> int:
    """Estimates the bytes that `prepare` would write to `out` now, without the shards that are finished."""
    manifest = describe(images, resize, mode)
    return _bytes_left(images, manifest, _kept(Path(out), manifest))


def _bytes_left(images: ImageSet, manifest: Manifest, kept: set[int]) -> int:
    done = sum(len(manifest.shards[number]) for number in kept)
    return estimate(images, manifest.resize, manifest.mode) * (len(images) - done) // max(1, len(images))


def require_room(out: Path, needed: int) -> None:
    """Raises an `InputError` if the disk of `out` has less than `needed` bytes free."""
    free = shutil.disk_usage(next(folder for folder in (out, *out.absolute().parents) if folder.exists())).free
    if needed > free:
        raise InputError(
            f"{out} needs about {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free: make room or choose "
            "another folder"
        )


def prepare(
    images: ImageSet,
    out: Path,
    resize: int = 256,
    mode: str = "square",
    workers: int | None = None,
    quiet: bool = False,
) -> Path:
    """Makes the store of `images` in `out`, with `workers` threads (default: one per core, at most eight).

    A second call continues an interrupted one at the first unfinished shard. On a finished store of the same images, it
    only rewrites the shards whose files have changed.

    Args:
        resize: the side, or the shorter side, of the stored images.
        mode: "square" or "shorter"; see `xbm_app.data.transforms.fit`.
    """
    out = Path(out)
    manifest = describe(images, resize, mode)
    kept = _kept(out, manifest)
    require_room(out, _bytes_left(images, manifest, kept))
    todo = {number: shard for number, shard in enumerate(manifest.shards) if number not in kept}
    out.mkdir(parents=True, exist_ok=True)
    kept_files = {shard_file(out, number) for number in kept}
    for stale in {*out.glob("*.part"), *out.glob("shard-*.bin")} - kept_files:
        stale.unlink()
    try:
        _write(out / "manifest.json", [json.dumps(asdict(manifest)).encode()])
        calls = [partial(resized, images, resize, mode, index) for shard in todo.values() for index in shard]
        workers = default_workers() if workers is None else workers
        with closing(in_order(calls, workers, ahead=4 * workers)) as results:
            pixels = track(results, f"preparing {images.name}", total=len(calls), quiet=quiet)
            for number, shard in todo.items():
                _write_shard(shard_file(out, number), [next(pixels) for _ in shard])
            next(pixels, None)  # lets the bar finish
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise InputError(f"the disk of {out} is full: make room and run it again, finished shards are kept") from None
    return out


def _kept(out: Path, manifest: Manifest) -> set[int]:
    """Returns the shards in `out` that are complete and up to date; refuses a folder with other content."""
    if not (out / "manifest.json").exists():
        if out.is_dir() and any(".part" not in each.suffixes and each.name != CHECKSUMS for each in out.iterdir()):
            raise InputError(f"{out} is not empty and not a store: choose another folder")
        return set()
    old = read_manifest(out)
    if (old.format, old.resize, old.mode, old.paths) != (FORMAT, manifest.resize, manifest.mode, manifest.paths):
        raise InputError(
            f"{out} holds {len(old.labels)} images of {old.name!r} as {old.resize} {old.mode}, not the {len(manifest.labels)} "
            f"of {manifest.name!r} as {manifest.resize} {manifest.mode}: delete it or choose another folder"
        )
    if len(old.labels) != len(manifest.labels):
        return set()
    return {
        number
        for number, shard in enumerate(manifest.shards)
        if old.pixels_of(shard) == manifest.pixels_of(shard) and _intact(shard_file(out, number), len(shard))
    }


def _intact(shard: Path, count: int) -> bool:
    try:
        return shard_shapes(verify(shard), count) is not None
    except DamagedFileError:
        return False


def _write_shard(path: Path, images: list[np.ndarray]) -> None:
    images = [image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2) for image in images]
    header = np.array([len(images), *(side for image in images for side in image.shape[:2])], "<i4")
    _write(path, [header.tobytes(), *(np.ascontiguousarray(image).data for image in images)])


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    with replacing(path, checksum=True) as temporary, temporary.open("wb") as file:
        file.writelines(chunks)


def write_outline(dataset: Dataset, out: Path) -> None:
    """Writes `dataset.json` beside the stores: class names and protocols, which the stores do not contain."""
    sets = parts(dataset)
    names = {id(images): part for part, images in sets.items()}
    outline = {
        "name": dataset.name,
        "sets": {
            part: {
                "name": images.name,
                "classes": [str(c) for c in images.class_names],
                **({} if images.groups is None else {"groups": images.groups.tolist()}),
            }
            for part, images in sets.items()
        },
        "protocols": [
            {
                "name": protocol.name,
                "query": names[id(protocol.query)],
                "gallery": None if protocol.gallery is None else names[id(protocol.gallery)],
                "ks": list(protocol.ks),
                "one_per_class": protocol.one_per_class,
            }
            for protocol in dataset.protocols
        ],
    }
    write_json(out / OUTLINE, outline, checksum=True)
