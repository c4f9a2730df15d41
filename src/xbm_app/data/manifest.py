"""What an image store was made from: how it tells another split, or changed files, from its own."""

import json
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from xbm.errors import InputError, unknown
from xbm_app.data.images import ImageSet
from xbm_app.data.transforms import MODES

FORMAT = 1
SHARD_BYTES = 60_000_000  # of square images; four times that, the longest that "shorter" makes them, stays below 256 MB


@dataclass(frozen=True)
class Manifest:
    """What a store was made from and how. Two equal manifests mean the same pixels under the same labels.

    Attributes:
        sizes, times: bytes and modification time (ns) of each file; None for images that were made rather than read.
        digest: of the pixels of such a made set.
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
        return [range(at, min(count, at + self.per_shard)) for at in range(0, count, self.per_shard)]

    def pixels_of(self, shard: range) -> object:
        """All that the pixels of a shard depend on."""
        part = slice(shard.start, shard.stop)
        lists = [each and each[part] for each in (self.paths, self.boxes, self.sizes, self.times)]
        return self.format, self.resize, self.mode, self.digest, lists


def describe(images: ImageSet, resize: int, mode: str) -> Manifest:
    """The manifest that a store of these images has now; looks at every file's size and time."""
    if mode not in MODES:
        raise unknown("resize mode", mode, MODES)
    stats = None
    if images.pixels is None:
        assert images.root is not None and images.paths is not None
        stats = [_stat(images.root / path) for path in images.paths]
    return Manifest(
        name=images.name,
        resize=resize,
        mode=mode,
        labels=images.labels.tolist(),
        paths=None if images.paths is None else list(images.paths),
        boxes=None if images.boxes is None else images.boxes.tolist(),
        sizes=None if stats is None else [each.st_size for each in stats],
        times=None if stats is None else [each.st_mtime_ns for each in stats],
        digest=None if images.pixels is None else sha256(images.pixels.tobytes()).hexdigest(),
    )


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError:
        raise InputError(f"{path} is missing: restore it, or take it off the list it is named in") from None


def read_manifest(folder: Path) -> Manifest:
    path = folder / "manifest.json"
    try:
        content = json.loads(path.read_bytes())
        version = content["format"]
        manifest = Manifest(**content) if version == FORMAT else None
    except (OSError, KeyError, TypeError, ValueError):
        raise InputError(f"{path} cannot be read: delete {folder} and run `xbm prepare` again") from None
    if manifest is None:
        raise InputError(f"{folder} has format {version}, this version reads {FORMAT}: delete it and run `xbm prepare` again")
    return manifest


def same_split(manifest: Manifest, images: ImageSet) -> bool:
    paths = None if images.paths is None else list(images.paths)
    boxes = None if images.boxes is None else images.boxes.tolist()
    return (manifest.paths, manifest.boxes, manifest.labels) == (paths, boxes, images.labels.tolist())


def check_current(folder: Path, manifest: Manifest, images: ImageSet) -> None:
    if not same_split(manifest, images):
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
