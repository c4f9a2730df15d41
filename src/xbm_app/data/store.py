"""The image store: every picture decoded and resized once, then memory-mapped, so that no training step decodes a JPEG.

A store is a folder. `manifest.json` says what it was made from (paths, labels, boxes, size and time of every file, resize
settings); `shard-00000.bin` and so on hold the pixels. A shard is, little-endian, the number of its images (int32), the
height and width of each (int32), then their pixels (uint8, h × w × 3) one after the other. It gets its name only when it
is whole, so a store is finished when all its shards are there.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from xbm.errors import InputError
from xbm_app.data.images import ImageSet
from xbm_app.data.manifest import FORMAT, Manifest, check_current, describe, read_manifest, same_split
from xbm_app.data.ordered import default_workers, in_order
from xbm_app.data.transforms import LONGEST, fit
from xbm_app.progress import track


def resized(images: ImageSet, size: int, mode: str, index: int) -> np.ndarray:
    """One image as `fit` makes it: the one way from a file to pixels.  # (h, w, 3) uint8; a made set's may be (h, w)"""
    if images.pixels is not None and images.pixels.shape[1:3] == (size, size):
        return images.pixels[index]
    # Decoding at no less than twice the size changed the result by a third of a grey level in the mean, 3 at most; decoding
    # at no less than the size itself changed it by up to 15.
    return fit(images.open(index, at_least=2 * size), size, mode)


def estimate(images: ImageSet, resize: int = 256, mode: str = "square") -> int:
    """About how many bytes a store of these images takes; exact for "square", from 200 images' shapes for "shorter"."""
    square = 3 * resize**2 * len(images)
    if mode == "square" or not len(images):
        return square
    if images.pixels is not None:
        aspects = [images.pixels.shape[2] / images.pixels.shape[1]]
    else:
        some = np.unique(np.linspace(0, len(images) - 1, 200).astype(int)).tolist()
        aspects = [width / height for width, height in (_shape(images, index) for index in some)]
    return int(square * np.mean([min(LONGEST, max(aspect, 1 / aspect)) for aspect in aspects]))


def _shape(images: ImageSet, index: int) -> tuple[int, int]:
    if images.boxes is not None:
        left, top, right, bottom = images.boxes[index].tolist()
        return max(1, right - left), max(1, bottom - top)
    assert images.root is not None and images.paths is not None
    try:
        with Image.open(images.root / images.paths[index]) as file:
            return file.size
    except OSError:
        return images.open(index).size  # raises the sentence for a file that is missing or broken


def to_write(images: ImageSet, out: Path, resize: int = 256, mode: str = "square") -> int:
    """About how many bytes `prepare` would write to `out` now: what finished shards hold is left out."""
    manifest = describe(images, resize, mode)
    done = sum(len(manifest.shards[number]) for number in _kept(Path(out), manifest))
    return estimate(images, resize, mode) * (len(images) - done) // max(1, len(images))


def require_room(out: Path, needed: int) -> None:
    """Refuses to start what the disk of `out` cannot hold."""
    free = shutil.disk_usage(next(folder for folder in (out, *out.absolute().parents) if folder.exists())).free
    if needed > free:
        raise InputError(
            f"{out} needs about {needed / 1e9:.1f} GB and its disk has {free / 1e9:.1f} GB free: make room or go elsewhere"
        )


def prepare(
    images: ImageSet,
    out: Path,
    resize: int = 256,
    mode: str = "square",
    workers: int | None = None,
    quiet: bool = False,
) -> Path:
    """Makes the store of `images` in `out`: decodes and resizes in `workers` threads, by default one a core up to eight.

    Stopped in the middle, a second call goes on with the first unfinished shard. Called on a finished store of the same
    images it makes anew only the shards whose files have changed.

    Args:
        resize: the side, or the shorter side, of the stored images.
        mode: "square" or "shorter": see `xbm_app.data.transforms.fit`.
    """
    out = Path(out)
    manifest = describe(images, resize, mode)
    kept = _kept(out, manifest)
    todo = [number for number in range(len(manifest.shards)) if number not in kept]
    missing = sum(len(manifest.shards[number]) for number in todo)
    require_room(out, estimate(images, resize, mode) * missing // max(1, len(images)))
    out.mkdir(parents=True, exist_ok=True)
    for stale in [*out.glob("*.part"), *(path for path in out.glob("shard-*.bin") if _number(path) not in kept)]:
        stale.unlink()
    try:
        _write(out / "manifest.json", [json.dumps(asdict(manifest)).encode()])
        wanted = (index for number in todo for index in manifest.shards[number])
        calls = (partial(resized, images, resize, mode, index) for index in wanted)
        workers = default_workers() if workers is None else workers
        with closing(in_order(calls, workers, ahead=4 * workers)) as made:
            pixels = track(made, f"preparing {images.name}", total=missing, quiet=quiet)
            for number in todo:
                _write_shard(_shard(out, number), [next(pixels) for _ in manifest.shards[number]])
            next(pixels, None)  # lets the bar finish
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise InputError(f"the disk of {out} is full: make room and run it again, finished shards are kept") from None
    return out


def _kept(out: Path, manifest: Manifest) -> set[int]:
    """The shards in `out` that can stay as they are; refuses a folder that holds something else."""
    if not (out / "manifest.json").exists():
        if out.is_dir() and any(each.suffix != ".part" for each in out.iterdir()):
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
    unchanged = {n for n, shard in enumerate(manifest.shards) if old.pixels_of(shard) == manifest.pixels_of(shard)}
    return {number for number in unchanged if _shapes(_shard(out, number), len(manifest.shards[number])) is not None}


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.bin"


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("shard-"))


def _write_shard(path: Path, images: list[np.ndarray]) -> None:
    images = [image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=2) for image in images]
    header = np.array([len(images), *(side for image in images for side in image.shape[:2])], "<i4")
    _write(path, [header.tobytes(), *(np.ascontiguousarray(image).data for image in images)])


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes beside the target, syncs, renames: the name never stands for half a file."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _shapes(path: Path, count: int) -> np.ndarray | None:
    """Height and width of each image of a shard, or None if it is not there or not whole.  # (count, 2)"""
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
    """Resized images, memory-mapped. Make one with `open_store`.

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
        """One image, without a copy.  # (h, w, 3) uint8"""
        shard, start = self._where[index].tolist()
        height, width = int(self.heights[index]), int(self.widths[index])
        return self._shards[shard][start : start + height * width * 3].reshape(height, width, 3)

    def pixels(self, indices: np.ndarray) -> Tensor:
        """Images of one shape, as all of a "square" store are.  # (B, H, W, 3) uint8"""
        views = [self.view(index) for index in np.asarray(indices).tolist()]
        if len({each.shape for each in views}) > 1:
            raise InputError(f"images of {self.path} differ in shape: take them one by one with view(index)")
        return torch.from_numpy(np.stack(views))

    def select(self, indices: np.ndarray) -> "Store":
        """The images at `indices`, their classes numbered anew, as `ImageSet.select` does."""
        indices = np.asarray(indices)
        labels = np.unique(self.labels[indices], return_inverse=True)[1].astype(np.int64)
        return replace(
            self, labels=labels, heights=self.heights[indices], widths=self.widths[indices], _where=self._where[indices]
        )


def open_store(path: Path, images: ImageSet | None) -> Store:
    """Opens a store, or the one of `images` in a folder of stores, after checking that it is finished and still right.

    Args:
        images: what the store must have been made from, with files unchanged since; None takes the store as it is, for
            machines that have nothing but the store.
    """
    path = Path(path)
    folder, manifest = _find(path, images)
    if images is not None:
        check_current(folder, manifest, images)
    shards, where, shapes = [], [], []
    for number, shard in enumerate(manifest.shards):
        file = _shard(folder, number)
        found = _shapes(file, len(shard))
        if found is None:
            raise InputError(f"{folder} is not finished, {file.name} is missing or cut short: run `xbm prepare` again")
        shards.append(np.memmap(file, np.uint8, mode="r", offset=4 + 8 * len(shard)))
        sizes = 3 * found.prod(axis=1)
        where.append(np.stack([np.full(len(shard), number), np.cumsum(sizes) - sizes], axis=1))
        shapes.append(found)
    both = np.concatenate(shapes) if shapes else np.empty((0, 2), np.int64)
    return Store(
        path=folder,
        resize=manifest.resize,
        mode=manifest.mode,
        labels=np.array(manifest.labels, np.int64),
        heights=both[:, 0],
        widths=both[:, 1],
        _shards=shards,
        _where=np.concatenate(where) if where else np.empty((0, 2), np.int64),
    )


def _find(path: Path, images: ImageSet | None) -> tuple[Path, Manifest]:
    if (path / "manifest.json").exists():
        return path, read_manifest(path)
    inside = sorted(each.parent for each in path.glob("*/manifest.json"))
    if not inside:
        raise InputError(f"{path} is no image store: make one with `xbm prepare NAME|DIR --out {path}`")
    names = ", ".join(each.name for each in inside)
    if images is None:
        raise InputError(f"{path} holds several stores: name one of {names}")
    for each in inside:
        manifest = read_manifest(each)
        if same_split(manifest, images):
            return each, manifest
    raise InputError(f"{path} has no store of the {len(images)} images of {images.name!r}, only {names}: prepare one")
