"""Image stores: resized images that training reads without decoding. `prepare` makes them.

A store is a folder with `manifest.json`, which says what the store was made from, and `shard-NNNNN.bin` files. A shard is its
number of images, the height and width of each (little-endian int32), then the pixels of one image after the other.

A data set is a folder with one store per set and `dataset.json`. It needs no image files beside it.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from xbm.errors import DamagedFileError, InputError, unknown
from xbm_app.data.decoding import LONGEST, open_image
from xbm_app.data.images import Dataset, EncodedSet, ImageSet, Protocol, missing_image, parts
from xbm_app.data.parallel import default_workers, in_order
from xbm_app.data.transforms import MODES, resized
from xbm_app.files import CHECKSUMS, checksums, reading, replacing, verify, write_json
from xbm_app.progress import track

FORMAT = 1
SHARD_BYTES = 60_000_000  # of square images; "shorter" images are up to 4 times as large, which stays below 256 MB
OUTLINE = "dataset.json"  # the stores in a folder, and the protocols of their data set


@dataclass(frozen=True)
class Manifest:
    """What a store was made from, and how. Equal manifests mean the same pixels under the same labels.

    Attributes:
        sizes, times: bytes and modification time (ns) of each file; None for generated images.
        digest: of the pixels of generated images.
    """

    name: str
    resize: int
    mode: str
    labels: list[int]
    paths: list[str] | None
    boxes: list[list[int]] | None
    sizes: list[int] | None
    times: list[int] | None
    digest: str | None
    format: int = FORMAT

    @property
    def per_shard(self) -> int:
        return max(1, SHARD_BYTES // (3 * self.resize**2))

    @property
    def shards(self) -> list[range]:
        count = len(self.labels)
        return [range(start, min(count, start + self.per_shard)) for start in range(0, count, self.per_shard)]

    def pixels_of(self, shard: range) -> object:
        """Returns everything that the pixels of a shard depend on."""
        part = slice(shard.start, shard.stop)
        lists = [each and each[part] for each in (self.paths, self.boxes, self.sizes, self.times)]
        return self.format, self.resize, self.mode, self.digest, lists


def describe(images: ImageSet, resize: int, mode: str) -> Manifest:
    """Returns the manifest that a store of these images would have now. Reads the size and time of every file."""
    if mode not in MODES:
        raise unknown("resize mode", mode, MODES)
    sizes = times = None
    if isinstance(images, EncodedSet):
        sizes, times = images.sizes().tolist(), images.times().tolist()
    elif images.pixels is None:
        assert images.root is not None and images.paths is not None
        stats = [_stat(images.root / path) for path in images.paths]
        sizes, times = [each.st_size for each in stats], [each.st_mtime_ns for each in stats]
    return Manifest(
        name=images.name,
        resize=resize,
        mode=mode,
        labels=images.labels.tolist(),
        paths=None if images.paths is None else list(images.paths),
        boxes=None if images.boxes is None else images.boxes.tolist(),
        sizes=sizes,
        times=times,
        digest=None if images.pixels is None else sha256(images.pixels.tobytes()).hexdigest(),
    )


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError:
        raise missing_image(path) from None


def read_manifest(folder: Path) -> Manifest:
    path = folder / "manifest.json"
    try:
        content = json.loads(verify(path).read_bytes())
        version = content["format"]
        manifest = Manifest(**content) if version == FORMAT else None
    except (OSError, KeyError, TypeError, ValueError):
        raise InputError(f"{path} cannot be read: delete {folder} and run `xbm prepare` again") from None
    if manifest is None:
        raise InputError(f"{folder} has format {version}, this version reads {FORMAT}: delete it and run `xbm prepare` again")
    return manifest


def _same_split(manifest: Manifest, images: ImageSet) -> bool:
    paths = None if images.paths is None else list(images.paths)
    boxes = None if images.boxes is None else images.boxes.tolist()
    return (manifest.paths, manifest.boxes, manifest.labels) == (paths, boxes, images.labels.tolist())


def _check_current(folder: Path, manifest: Manifest, images: ImageSet) -> None:
    if not _same_split(manifest, images):
        raise InputError(
            f"{folder} was made from {len(manifest.labels)} images of {manifest.name!r}, whose paths, labels or boxes are not "
            f"those of the {len(images)} of {images.name!r}: prepare a store for these"
        )
    now = describe(images, manifest.resize, manifest.mode)
    if now.digest != manifest.digest:
        raise InputError(f"the pixels of {images.name!r} have changed since {folder} was made: run `xbm prepare` again")
    if (now.sizes, now.times) != (manifest.sizes, manifest.times):
        assert now.paths is not None and now.sizes and now.times and manifest.sizes and manifest.times
        pairs = zip(zip(now.sizes, now.times), zip(manifest.sizes, manifest.times))
        first = next(path for path, (new, old) in zip(now.paths, pairs) if new != old)
        raise InputError(f"{first} has changed since {folder} was made: run `xbm prepare` again")


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.bin"


def checksums_of_store(folder: Path) -> list[str] | None:
    """The checksums of all shards in their order; None if a shard has none."""
    listed = checksums(folder) or {}
    shards = sorted(folder.glob("shard-*.bin"))
    return [listed[shard.name][0] for shard in shards] if all(shard.name in listed for shard in shards) else None


def shard_shapes(path: Path, count: int) -> np.ndarray | None:
    """Returns the height and width of each image of a shard, or None if the file is missing or truncated.  # (count, 2)"""
    try:
        header = np.fromfile(path, "<i4", count=1 + 2 * count).astype(np.int64)
        size = path.stat().st_size
    except OSError:
        return None
    if len(header) != 1 + 2 * count or header[0] != count:
        return None
    shapes = header[1:].reshape(count, 2)
    return shapes if size == 4 * len(header) + 3 * shapes.prod(axis=1).sum() else None


@dataclass(frozen=True, eq=False)
class Store:
    """Resized images, memory-mapped. `open_store` returns one.

    Attributes:
        labels: (N,) int64.
        heights, widths: (N,) int64, of each image.
    """

    path: Path
    resize: int
    mode: str
    labels: np.ndarray
    heights: np.ndarray
    widths: np.ndarray
    _shards: Sequence[np.ndarray]  # each (bytes of its pixels,) uint8
    _where: np.ndarray  # (N, 2): shard, first byte in it

    def __len__(self) -> int:
        return len(self.labels)

    def view(self, index: int) -> np.ndarray:
        """Returns one image without copying it.  # (h, w, 3) uint8"""
        shard, start = self._where[index].tolist()
        height, width = int(self.heights[index]), int(self.widths[index])
        return self._shards[shard][start : start + height * width * 3].reshape(height, width, 3)

    def select(self, indices: np.ndarray) -> "Store":
        """Returns the images at `indices` with their classes renumbered, as `ImageSet.select` does."""
        indices = np.asarray(indices)
        labels = np.unique(self.labels[indices], return_inverse=True)[1].astype(np.int64)
        return replace(
            self, labels=labels, heights=self.heights[indices], widths=self.widths[indices], _where=self._where[indices]
        )


def open_store(path: Path, images: ImageSet | None) -> Store:
    """Opens a store, or the store of `images` in a folder of stores, after checking that it is complete and up to date.

    Args:
        images: the images that the store must have been made from, with files unchanged since. None skips this check, for
            machines that have the store but not the image files.
    """
    folder, manifest = _find(Path(path), images)
    with reading(folder / "manifest.json"):
        if images is not None:
            _check_current(folder, manifest, images)
        return _open(folder, manifest)


def _open(folder: Path, manifest: Manifest) -> Store:
    shards, where, shapes = [], [np.empty((0, 2), np.int64)], [np.empty((0, 2), np.int64)]
    for number, shard in enumerate(manifest.shards):
        file = shard_file(folder, number)
        in_shard = shard_shapes(file, len(shard))
        if in_shard is None:
            raise InputError(f"{folder} is not finished, {file.name} is missing or cut short: run `xbm prepare` again")
        shards.append(np.memmap(file, np.uint8, mode="r", offset=4 + 8 * len(shard)))
        sizes = 3 * in_shard.prod(axis=1)
        where.append(np.stack([np.full(len(shard), number), np.cumsum(sizes) - sizes], axis=1))
        shapes.append(in_shard)
    files = [shard_file(folder, number) for number in range(len(shards))]
    workers, again = default_workers(), "run `xbm prepare` again"
    for _ in in_order((partial(verify, file, remedy=again) for file in files), workers, ahead=workers):
        pass
    heights, widths = np.concatenate(shapes).T
    labels = np.array(manifest.labels, np.int64)
    return Store(folder, manifest.resize, manifest.mode, labels, heights, widths, shards, np.concatenate(where))


def _find(path: Path, images: ImageSet | None) -> tuple[Path, Manifest]:
    if (path / "manifest.json").exists():
        return path, read_manifest(path)
    folders = sorted(each.parent for each in path.glob("*/manifest.json"))
    if not folders:
        raise InputError(f"{path} is no image store: make one with `xbm prepare NAME|DIR --out {path}`")
    names = ", ".join(folder.name for folder in folders)
    if images is None:
        raise InputError(f"{path} holds several stores: name one of {names}")
    for folder in folders:
        manifest = read_manifest(folder)
        if _same_split(manifest, images):
            return folder, manifest
    raise InputError(f"{path} has no store of the {len(images)} images of {images.name!r}, only {names}: prepare one")


@dataclass(frozen=True, eq=False)
class StoredSet(ImageSet):
    """A set whose images are read from a store, at the size they have there."""

    store: Store | None = None

    def open(self, index: int, at_least: int | None = None) -> Image.Image:
        assert self.store is not None
        return Image.fromarray(self.store.view(index))

    def take(self, indices: np.ndarray) -> "StoredSet":
        assert self.store is not None
        return replace(super().take(indices), store=self.store.select(indices))  # type: ignore[call-arg, return-value]


def folder_of(part: str) -> str:
    """Returns the folder name for the store of one set."""
    return part.replace(" ", "-")


def read_stored(path: Path) -> Dataset:
    """Reads the data set that a folder of stores was made from, with images from the stores.

    Raises:
        InputError: `xbm prepare` did not make this folder, or did not finish.
    """
    try:
        outline = json.loads(verify(path / OUTLINE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{path} holds no {OUTLINE}: make it with `xbm prepare NAME --root DIR --out {path}`") from None
    with reading(path / OUTLINE):
        return _dataset(path, outline)


def _dataset(path: Path, outline: dict[str, Any]) -> Dataset:
    sets = {}
    for part, content in outline["sets"].items():
        folder = path / folder_of(part)
        manifest, store = read_manifest(folder), open_store(folder, None)
        sets[part] = StoredSet(
            content["name"],
            store.labels,
            content["classes"],
            root=path,
            paths=manifest.paths or [f"{part}/{index}" for index in range(len(store))],
            boxes=None if manifest.boxes is None else np.array(manifest.boxes, np.int64),
            groups=np.array(content["groups"], np.int64) if "groups" in content else None,
            store=store,
        )
    protocols = tuple(
        Protocol(p["name"], sets[p["query"]], tuple(p["ks"]), sets[p["gallery"]] if p["gallery"] else None, p["one_per_class"])
        for p in outline["protocols"]
    )
    return Dataset(outline["name"], sets["train"], protocols)


# ------------------------------------------------------------------ `xbm prepare`: every image is decoded and resized once


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
