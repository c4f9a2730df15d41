"""The data of a run: read, checked and split when the run begins, then delivered to the model in batches."""

import hashlib
import json
import math
import os
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.errors import InputError, unknown
from xbm_app.data.benchmarks import BENCHMARKS, read_benchmark
from xbm_app.data.check import BROKEN, check_dataset, report, skip_problems
from xbm_app.data.decoding import UNREADABLE, open_image
from xbm_app.data.feeds import Batches, DecodeFeed, Feed, ResidentFeed, StoreFeed
from xbm_app.data.images import Dataset, EncodedSet, ImageSet, Protocol, missing_image, parts
from xbm_app.data.own_data import is_table, read_own
from xbm_app.data.own_images import GROUP, Columns, read_table, write_split
from xbm_app.data.parallel import in_order
from xbm_app.data.samplers import PKSampler, ShuffleSampler, StreamSampler
from xbm_app.data.store import Store, StoredSet, checksums_of_store, open_store, read_stored
from xbm_app.data.tar_shards import Shards
from xbm_app.data.transforms import Augmentation, Transform
from xbm_app.files import verify
from xbm_app.models import EmbeddingModel
from xbm_app.train.config import Config, Data

Batch = tuple[Tensor, Tensor, Tensor]  # images, labels, ids

SAMPLED = 64  # images whose bytes are part of a fingerprint
SPLIT = "split.csv"  # in the folder of a run on own data
SPLIT_COLUMNS = Columns(group=GROUP)  # of that file, whatever those of the user's table are
AUGMENTATIONS = {
    "paper": "crop", "official": "resized_crop", "shift": "shift", "strong": "resized_crop", "none": "none",
}  # fmt: skip
PREFETCH = 1  # threads, at least, that prepare the next batches while a CPU trains on this one
RESIDENT_BYTES = 2 << 30  # on a CPU, sets up to this size are kept decoded in main memory


def read_data(data: Data, split: Path | None = None) -> Dataset:
    """Reads the data set that a config names; the user's own data by an existing `split` file, where there is one."""
    if data.name == "glyphs":
        from xbm_app.data.glyphs import read_glyphs

        return read_glyphs(size=data.resize)
    if data.name != "own" and data.name not in BENCHMARKS:
        raise unknown("data set", data.name, ["glyphs", "own", *BENCHMARKS])
    if data.root is None and data.store is not None:
        dataset = read_stored(Path(data.store))
        return skip_problems(dataset, check_dataset(dataset)) if data.skip_problems else dataset
    if data.root is None:
        option = "--data DIR" if data.name == "own" else "--root DIR"
        raise InputError(f"the folder with the images of {data.name} is not set: pass {option} (data.root)")
    root, columns = Path(data.root), Columns(data.label, data.split, data.exclude_same)
    if data.name != "own":
        return read_benchmark(data.name, root)
    if split is not None and verify(split).exists():
        with warnings.catch_warnings(action="ignore"):  # the user saw them when the run began
            dataset = read_table(split, root.parent if is_table(root) else root, columns=SPLIT_COLUMNS)
        return _renamed(dataset, root.stem if is_table(root) else os.path.basename(os.path.realpath(root)))
    dataset = read_own(data.root, columns)
    if data.skip_problems and isinstance(dataset.train, EncodedSet):
        raise InputError("--skip-problems opens every image beforehand, but not those within larger files: omit it")
    return dataset


def _renamed(dataset: Dataset, name: str) -> Dataset:
    """Names a data set after its source, not after the file with its split."""

    def named(images: ImageSet) -> ImageSet:
        return replace(images, name=f"{name} {images.name.removeprefix(dataset.name + ' ')}")

    first = dataset.protocols[0]
    gallery = None if first.gallery is None else named(first.gallery)
    return Dataset(name, named(dataset.train), (replace(first, query=named(first.query), gallery=gallery),))


def begin_run(config: Config, folder: Path, ranks: Ranks | None = None) -> Dataset:
    """Reads the data of a new run in its folder. With several processes the first one does, the others wait.

    The user's own data is checked before training, and its split into training and test images is written to `split.csv`:
    the run keeps to that split, even if images are added later.

    Raises:
        InputError: the user's own data has broken images, and `data.skip_problems` is off.
    """
    if ranks is not None and not ranks.first:
        ranks.wait()
        return read_run(config, folder)
    dataset = read_data(config.data)
    if config.data.name == "own" and config.data.root is not None:  # a store has one split, whose images were readable
        problems = check_dataset(dataset)
        if problems:
            print(report(problems), file=sys.stderr)
        if config.data.skip_problems:
            dataset = skip_problems(dataset, problems)
        elif broken := [problem for problem in problems if problem.kind in BROKEN]:
            count = len({problem.text for problem in broken})
            are = "image is" if count == 1 else "images are"
            raise InputError(f"{count} {are} broken in {config.data.root}: repair them, or add --skip-problems")
        if not isinstance(dataset.train, EncodedSet):  # the split of shards is in their names, or that of their classes
            write_split(dataset, folder / SPLIT)
    folder.mkdir(parents=True, exist_ok=True)
    if ranks is not None:
        ranks.wait()
    return read_run(config, folder)


def read_run(config: Config, folder: Path) -> Dataset:
    """Reads the data of a run as it was when the run began, with its held-out classes and label noise applied."""
    dataset = read_data(config.data, folder / SPLIT)
    if config.data.holdout:
        test = dataset.protocols
        dataset = hold_out(dataset, config.data.holdout, config.data.fold)
        if config.optim.schedule == "plateau":  # here they are held out for the schedule: the test classes score the result
            dataset = replace(dataset, protocols=(*dataset.protocols, *test))
    return replace(dataset, train=flip_labels(dataset.train, config.data.noise)) if config.data.noise else dataset


def fingerprint(images: ImageSet) -> dict[str, str]:
    """Tells whether the images of a run are still the same: their list, and their sizes and the bytes of some of them.

    "source" is what was read: pixels from a store and from files cannot be compared. "store" is made of the checksums of a
    whole store, which were compared when it was opened. "times", of the files, differs in a copy of the data too; to read all
    files again could take hours.
    """
    boxes = None if images.boxes is None else images.boxes.tolist()
    listed = zlib.crc32(json.dumps([images.paths and list(images.paths), boxes, images.labels.tolist()]).encode())
    some, content = np.unique(np.linspace(0, len(images) - 1, SAMPLED).astype(int)).tolist(), 0
    every: dict[str, str] = {}
    if isinstance(images, EncodedSet):
        every = {"times": f"{zlib.crc32(np.ascontiguousarray(images.times(), '<i8').tobytes()):08x}"}
        source, parts = "files", [json.dumps(images.sizes().tolist()).encode(), *(images.bytes_of(index) for index in some)]
    elif images.pixels is not None or isinstance(images, StoredSet):
        source, parts = "pixels", [np.asarray(images.open(index)).tobytes() for index in some]
        if isinstance(images, StoredSet) and images.store is not None and (sums := checksums_of_store(images.store.path)):
            every = {"store": f"{zlib.crc32(json.dumps(sums).encode()):08x}"}
    else:
        assert images.root is not None and images.paths is not None
        files = [images.root / path for path in images.paths]
        try:
            stats = [file.stat() for file in files]
            sizes, times = [each.st_size for each in stats], np.array([each.st_mtime_ns for each in stats], "<i8")
            every = {"times": f"{zlib.crc32(times.tobytes()):08x}"}
            source, parts = "files", [json.dumps(sizes).encode(), *(files[index].read_bytes() for index in some)]
        except OSError as error:
            raise missing_image(Path(error.filename)) from None
    for part in parts:
        content = zlib.crc32(part, content)
    return {"list": f"{listed:08x}", "source": source, "content": f"{content:08x}", **every}


def hold_out(dataset: Dataset, share: float, fold: int = 0) -> Dataset:
    """Splits the training classes: most for training, a `share` for validation, so that nothing is chosen on test classes.

    Classes are chosen by a hash of their names, so every run holds out the same ones. Each `fold` holds out other classes.
    """
    train = dataset.train
    order = sorted(range(train.num_classes), key=lambda k: hashlib.sha256(str(train.class_names[k]).encode()).digest())
    count, classes = round(share * train.num_classes), train.num_classes
    if classes < 4:
        raise InputError(f"data.holdout needs at least 4 training classes, got {classes}: set it to 0")
    if not 1 < count < classes - 1:
        better = max(0.2, math.ceil(200 / classes) / 100)
        raise InputError(f"data.holdout={share} of {classes} classes leaves fewer than 2 on one side: try {better:g}")
    if (fold + 1) * count > classes:
        raise InputError(f"data.fold must be less than {classes // count} with data.holdout={share}, got {fold}")
    held = np.isin(train.labels, order[fold * count : (fold + 1) * count])
    ks = dataset.protocols[0].ks
    kept = train.select(np.flatnonzero(~held), f"{train.name} (less the held-out classes)")
    scored = train.select(np.flatnonzero(held), f"{train.name} (held-out classes)")
    return replace(dataset, train=kept, protocols=(Protocol("held-out", scored, ks),))


def flip_labels(images: ImageSet, share: float) -> ImageSet:
    """Replaces a `share` of the labels by those of other classes, to measure how robust a method is to label noise.

    The choice depends only on the number of images, so all methods and seeds see the same wrong labels.
    """
    if not 0 <= share < 1:
        raise InputError(f"data.noise must satisfy 0 ≤ noise < 1, got {share}")
    if share and images.num_classes < 2:
        raise InputError("data.noise needs at least 2 training classes, got 1: set it to 0")
    draw = np.random.default_rng(0)
    wrong = draw.permutation(len(images))[: round(share * len(images))]
    labels = images.labels.copy()
    labels[wrong] = (labels[wrong] + draw.integers(1, images.num_classes, len(wrong))) % images.num_classes
    return replace(images, labels=labels)


def is_stream(images: ImageSet) -> bool:
    """Whether a set is read in the order of its shards."""
    return isinstance(images, EncodedSet) and isinstance(images.source, Shards)


def typical_side(images: ImageSet) -> int:
    """The median of the longer sides of some images, in pixels; opens at most 200, and only their headers if possible."""
    sides = []
    for index in np.unique(np.linspace(0, len(images) - 1, min(len(images), 200)).astype(int)).tolist():
        if images.boxes is not None:
            left, top, right, bottom = images.boxes[index].tolist()
            sides.append(max(right - left, bottom - top))
        elif images.paths is not None and images.root is not None and (path := images.root / images.paths[index]).is_file():
            with suppress(*UNREADABLE), open_image(path) as file:  # broken ones are reported later
                sides.append(max(file.size))
        else:
            sides.append(max(images.open(index).size))
    return int(np.median(sides)) if sides else sys.maxsize


def augmentation_of(config: Config, model: EmbeddingModel, transform: Transform | None = None) -> Augmentation:
    """How a config prepares images for its model; `transform` is the user's own, for training."""
    data = config.data
    if data.augmentation not in AUGMENTATIONS:
        raise unknown("data.augmentation", data.augmentation, AUGMENTATIONS)
    kind = AUGMENTATIONS[data.augmentation]
    return Augmentation(
        kind=kind,
        resize=data.resize,
        crop=data.crop,
        flip=kind in ("crop", "resized_crop"),
        padding=max(1, data.crop // 16) if kind == "shift" else 0,
        mean=model.mean,
        std=model.std,
        channels=len(model.mean),
        interpolation=data.interpolation,
        strong=data.augmentation == "strong",
        transform=transform,
    )


def feed_of(images: ImageSet, config: Config, augmentation: Augmentation, device: torch.device) -> Feed:
    """Chooses how images reach the model: `data.feed`, or what suits the set and the machine."""
    how = config.data.feed
    store = None if config.data.store is None else store_of(images, config.data)
    if how == "auto":
        size = len(images) * augmentation.resize**2 * augmentation.channels
        fits = size < (torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else RESIDENT_BYTES)
        on_device = device.type != "cuda" or augmentation.transform is None  # the user's transform runs on the CPU
        if on_device and (images.pixels is not None or (fits and device.type == "cuda")):
            how = "resident"
        else:
            how = "store" if store is not None else "decode"
    if how == "resident":
        if augmentation.transform is not None and device.type == "cuda":
            raise InputError("a transform of your own runs on the CPU: set data.feed=auto")
        return ResidentFeed(store or images, augmentation, config.seed, device)
    if how == "store":
        if store is None:
            raise InputError("data.feed=store needs data.store: create a store with `xbm prepare`")
        return StoreFeed(store, augmentation, config.seed)
    if how == "decode":
        return DecodeFeed(images, augmentation, config.seed)
    raise unknown("data.feed", how, ["auto", "decode", "store", "resident"])


def sampler_of(images: ImageSet, config: Config, rank: int = 0, world: int = 1) -> PKSampler | ShuffleSampler | StreamSampler:
    batch = config.batch
    if batch.sampler == "shuffle":
        return ShuffleSampler(len(images), batch.size, config.seed, rank, world)
    if batch.sampler not in ("pk", "stream"):
        raise unknown("batch.sampler", batch.sampler, ["pk", "shuffle", "stream"])
    if batch.size % batch.per_class:
        raise InputError(f"batch.size={batch.size} must be a multiple of batch.per_class={batch.per_class}")
    P, K = batch.size // batch.per_class, batch.per_class
    if batch.sampler == "pk":
        return PKSampler(images.labels, P, K, config.seed, rank, world)
    if not isinstance(images, EncodedSet):
        raise InputError("batch.sampler=stream reads shards in their order: set batch.sampler=pk for other data")
    return StreamSampler(images.labels, images.shards(), P, K, config.seed, batch.buffer, rank, world)


class TrainingData:
    """Delivers the batches of a run. They are a function of (seed, step), so a run can start at any step and be exact.

    Attributes:
        feed: the training images by index.
        sampler: the indices of every batch.
        batches_per_step: how many batches one optimizer step reads.
    """

    def __init__(self, config: Config, feed: Feed, images: ImageSet, device: torch.device, ranks: Ranks) -> None:
        self.config, self.device, self.ranks = config, device, ranks
        self.feed = feed
        self.sampler = sampler_of(images, config, ranks.rank, ranks.world)
        updates = config.memory.updates_per_step if config.memory.ratio else 1
        self.batches_per_step = updates * config.batch.accumulate

    def batches(self, start: int) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Iterates over the batches from step `start` to the last: (number, images, labels, ids)."""
        first, stop = start * self.batches_per_step, self.config.optim.iterations * self.batches_per_step
        workers = max(PREFETCH, self.feed.workers) if self.device.type == "cpu" else None
        return iter(Batches(self.feed, self.sampler, first, stop, workers, self.device))

    def stream_state(self, step: int) -> dict[str, Tensor] | None:
        """What the batches from `step` on depend on; None if that is no more than the seed and the step."""
        return self.sampler.state(step * self.batches_per_step) if isinstance(self.sampler, StreamSampler) else None

    def load_stream_state(self, state: dict[str, Tensor] | None) -> None:
        if isinstance(self.sampler, StreamSampler) and state is not None:
            self.sampler.load_state(state)

    def random_indices(self) -> list[np.ndarray]:
        """Draws what the memory is filled from: each training image once, but no more images than the run trains on."""
        size = self.config.batch.size
        if isinstance(self.sampler, StreamSampler):
            order = self.sampler.order(-1)
        else:
            order = np.random.default_rng([self.config.seed, 1]).permutation(len(self.feed))
        order = order[: size * self.config.optim.iterations]
        parts = np.array_split(order, math.ceil(len(order) / size))  # equal sizes: batch norm fails on a single image
        return [np.array_split(part, self.ranks.world)[self.ranks.rank] for part in parts]

    def random_batches(self, parts: list[np.ndarray]) -> Iterator[Batch]:
        """Yields these images in augmented views that training never shows."""
        calls = (partial(self.feed.train, indices, -1 - k) for k, indices in enumerate(parts))
        workers = self.feed.workers if self.feed.train_in_threads else 0
        for indices, images in zip(parts, in_order(calls, workers, ahead=workers + 1)):
            ids = self.feed.ids(indices).to(self.device)
            yield images.to(self.device), self.feed.labels.to(self.device)[ids], ids


def store_of(images: ImageSet, data: Data) -> Store:
    """Opens the stored pixels of a set, or of the part of a stored set that is left after `data.holdout` and such.

    The labels are those of `images`, which differ from the stored ones under `data.noise`.
    """
    return replace(_stored(images, data), labels=np.asarray(images.labels, np.int64))


def _stored(images: ImageSet, data: Data) -> Store:
    if isinstance(images, StoredSet) and images.store is not None:
        return images.store
    path = Path(data.store or "")
    if data.holdout or data.skip_problems or data.noise:
        for whole in parts(read_data(data)).values():
            position_of = {key: position for position, key in enumerate(_keys(whole))}
            positions = [position_of.get(key, -1) for key in _keys(images)]
            if positions and -1 not in positions:
                return open_store(path, whole).select(np.array(positions))
    return open_store(path, images)


def _keys(images: ImageSet) -> list[tuple[str, object]]:
    boxes = [None] * len(images) if images.boxes is None else [tuple(box) for box in images.boxes.tolist()]
    return list(zip(images.paths or (), boxes))
