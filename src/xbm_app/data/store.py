"""Image stores: resized images that training reads without decoding. `store_writer` makes them.

A store is a folder with `manifest.json`, which says what the store was made from, and `shard-NNNNN.bin` files. A shard is its
number of images, the height and width of each (little-endian int32), then the pixels of one image after the other.

A data set is a folder with one store per set and `dataset.json`. It needs no image files beside it.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from xbm.errors import InputError, unknown
from xbm_app.data.encoded import EncodedSet
from xbm_app.data.images import Dataset, ImageSet, Protocol, missing_image
from xbm_app.data.parallel import default_workers, in_order
from xbm_app.data.transforms import MODES
from xbm_app.files import reading, verify

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
